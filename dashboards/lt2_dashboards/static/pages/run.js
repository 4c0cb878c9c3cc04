// One run: where it stands, its curves, its settings, what it was evaluated to.

import { poll } from "../api.js";
import { figure, numbers } from "../chart.js";
import { curveControls, curveParams } from "../controls.js";
import { facts, fill, h, notice, status } from "../dom.js";
import { ago, date, duration, number } from "../format.js";
import { params, setParams } from "../url.js";

const FIRST = ["loss", "grad_norm", "lr", "tokens_per_s", "step_time", "data_wait", "mfu"];

export function runPage(main, run) {
  const header = h("header", { class: "page-head" });
  const messages = h("div");
  const controls = curveControls();
  const grid = h("section", { class: "tiles run-tiles", "aria-label": "Curves" });
  const side = h("section", { class: "panels" });
  const tiles = new Map();
  let body = null;
  fill(main, header, messages, h("div", { class: "toolbar" }, h("h2", {}, "Curves"), h("span", { class: "grow" }), controls.element), grid, side);
  fill(messages, h("p", { class: "quiet-note loading" }, "Reading the run…"));
  document.title = `${run} · LT2`;

  const stop = poll(`/api/runs/${encodeURIComponent(run)}`, (found) => { body = found; show(); }, (error) => {
    fill(header, h("h1", {}, run));
    fill(messages, notice("error", "This run cannot be shown", error.message, h("a", { href: "/" }, "All runs")));
    grid.hidden = side.hidden = true;
  });

  function show() {
    grid.hidden = side.hidden = false;
    const elapsed = body.updated - body.created;
    const eta = body.status === "running" && body.total && body.step > 0 ? elapsed * ((body.total - body.step) / body.step) : null;
    fill(header, h("nav", { class: "crumbs", "aria-label": "Path" }, h("a", { href: "/" }, "Runs"), " / "), h("h1", {}, run), status(body.status),
      facts([
        ["step", body.total ? `${number(body.step)} of ${number(body.total)}` : number(body.step)],
        ["loss", number(body.last.loss)],
        ["tokens/s", body.last.tokens_per_s === undefined ? null : number(body.last.tokens_per_s)],
        ["attention in", body.attention_in],
        ["time", duration(elapsed)],
        ["remaining", eta === null ? null : duration(eta)],
        ["started", date(body.created)],
        ["last word", ago(body.updated)],
        ["log", body.step_id ? h("a", { href: `/workflows/-/steps/${body.step_id}` }, "attempts and log") : null],
      ]));
    fill(messages, body.status === "stalled" ? notice("warn", "No word from this run for more than five minutes", "Its process may have died. Running the same workflow again continues it from its last checkpoint.") : null,
      body.skipped.length ? notice("warn", "Some of this run's files could not be read and are missing from the curves", ...body.skipped) : null);
    drawTiles();
    fill(side, evaluations(), panel("Settings", body.config, true), panel("Summary", body.summary), panel("Provenance", body.info));
  }

  function drawTiles() {
    controls.sync();
    if (!body) return;
    const order = [...FIRST.filter((metric) => body.metrics.includes(metric)), ...body.metrics.filter((metric) => !FIRST.includes(metric))];
    if (!order.length) return fill(grid, h("p", { class: "quiet-note" }, "Nothing is logged yet; curves appear with the first steps."));
    if (!tiles.size) fill(grid);
    for (const metric of order) {
      if (!tiles.has(metric)) {
        tiles.set(metric, figure("curves", { small: true, group: "run" }));
        grid.append(tiles.get(metric).element);
      }
      tiles.get(metric).load({ runs: run, metric, ...curveParams(), ...(metric === order[0] ? { points: 1500 } : {}) });
    }
  }

  function panel(name, values, searchable) {
    const keys = Object.keys(values);
    if (!keys.length) return null;
    const wanted = (params().setting ?? "").toLowerCase();
    const list = h("dl", { class: "settings" });
    const draw = (text) => fill(list, keys.filter((key) => !text || `${key} ${values[key]}`.toLowerCase().includes(text)).map((key) => [h("dt", {}, key), h("dd", { title: values[key] }, values[key])]));
    draw(searchable ? wanted : "");
    const input = searchable ? h("input", { type: "search", placeholder: "Find a setting", "aria-label": "Find a setting", value: params().setting ?? "", oninput: (event) => { setParams({ setting: event.target.value }); draw(event.target.value.toLowerCase()); } }) : null;
    return h("section", { class: "panel" }, h("h2", {}, name, input), list);
  }

  // Readings at every (loop, layer) are a figure, not results.
  function evaluations() {
    const results = body.evals.filter((row) => row.layer === undefined);
    const links = [
      results.length < body.evals.length ? ["loop_diagnostics", "Unrolled diagnostics"] : null,
      results.some((row) => row.metric?.endsWith("_tokens_per_s")) ? ["throughput", "Throughput"] : null,
      results.some((row) => row.name === "depth") ? ["depth", "Depth"] : null,
    ].filter(Boolean);
    if (!body.evals.length) return null;
    const extra = [...new Set(results.flatMap((row) => Object.keys(row)))].filter((key) => !["name", "task", "metric", "value"].includes(key) && results.some((row) => row[key] !== null && row[key] !== "" && row[key] !== undefined));
    const columns = ["name", "task", "metric", "value", ...extra];
    const rows = results.map((row) => columns.map((column) => (/sha256$/.test(column) ? row[column]?.slice(0, 8) : row[column]) ?? null));
    return h("section", { class: "panel wide" }, h("h2", {}, "Evaluations", h("span", { class: "links" }, links.map(([name, text]) => h("a", { href: `/figures/${name}?runs=${run}` }, text)))),
      results.length ? h("div", { class: "table-wrap", tabindex: "0" }, numbers({ columns, rows })) : null);
  }

  return { update: drawTiles, destroy() { stop(); for (const tile of tiles.values()) tile.destroy(); } };
}
