// One run: where it stands, its curves, its settings, what it was evaluated to.

import { poll } from "../api.js";
import { figure, sortable } from "../chart.js";
import { curveControls, curveParams } from "../controls.js";
import { facts, fill, h, notice, parts, status } from "../dom.js";
import { ago, date, duration, number } from "../format.js";
import { params, setParams } from "../url.js";

const FIRST = ["loss", "validation_loss", "grad_norm", "lr", "tokens_per_s", "step_time", "data_wait", "mfu"];

const known = (value) => (value === undefined ? null : number(value));
const percent = (fraction) => (typeof fraction === "number" ? `${number(100 * fraction, 3)} %` : null);

// A run that was cut off cannot say so itself: its step can, sooner than five minutes of silence.
const ENDED = ["failed", "interrupted", "infrastructure", "lost"];
const stateOf = ({ status: own, attempt }) => (["running", "stalled"].includes(own) && ENDED.includes(attempt?.state) ? attempt.state : own);

// Why it does not go on, and what to do about it.
function trouble(state, attempt, log) {
  const go = "Run the same command again: it resumes from the last checkpoint.";
  const [title, next] = {
    failed: ["This run failed", `${attempt?.error ? "Do what the error asks." : "Its log says why."} ${go} Other settings start another run and leave this one as it is.`],
    interrupted: ["This run was interrupted", go],
    infrastructure: ["The machines under this run failed", `It is retried automatically up to resources.retries times. After that: ${go.charAt(0).toLowerCase()}${go.slice(1)}`],
    lost: ["The process of this run ended without reporting an error", go],
    stalled: ["This run has not reported for more than five minutes", `Its process may have died. ${go}`],
  }[state] ?? [];
  if (!title) return null;
  const details = [attempt?.error, next].filter(Boolean);
  return notice(state === "failed" ? "error" : "warn", title, ...details, ...(attempt ? [h("a", { href: log }, "Attempts and log")] : []));
}

// Rollbacks, preemptions, evaluations beside training that failed: newest first.
function happened(events) {
  if (!events.length) return null;
  const said = ({ kind, message, checkpoint, state, reason, to }) => (kind === "evaluation" ? `of ${checkpoint} ${state}: ${reason}` : [message, kind === "rollback" ? `went back to ${to ?? "the start"}` : null].filter(Boolean).join("; "));
  return h("section", { class: "panel" }, h("h2", {}, "What happened"), h("div", { class: "table-wrap story", tabindex: "0", role: "region", "aria-label": "What happened" }, h("table", { class: "numbers events" }, h("thead", { class: "hidden" }, h("tr", {}, ["time", "what", "step", "told"].map((name) => h("th", { scope: "col" }, name)))), h("tbody", {}, events.map((event) =>
    h("tr", {}, h("td", {}, date(event.time)), h("td", {}, event.kind), h("td", { class: "num" }, event.step === undefined ? "" : `step ${number(event.step)}`), h("td", { class: "said" }, said(event))))))));
}

// What people wrote with `lt2 note`, newest first.
function noted(notes) {
  return notes.length ? h("section", { class: "panel noted", "aria-label": "Notes" }, notes.map(({ note, author, time }) => h("p", {}, note, h("small", { class: "faint" }, ` ${author ?? ""}, ${date(time)}`)))) : null;
}

// The same weights at several depths: beside each other, for they differ in little else.
function byDepth({ depths, rows }) {
  if (!rows.length) return null;
  const cell = (found) => h("td", { class: "num" }, found ? number(found.value) : "–", typeof found?.stderr === "number" ? h("small", { class: "faint" }, ` ± ${number(found.stderr, 2)}`) : null);
  return [h("h2", {}, "At several depths"), h("div", { class: "table-wrap", tabindex: "0", role: "region", "aria-label": "Evaluations at several depths" }, h("table", { class: "numbers" },
    h("thead", {}, h("tr", {}, ["task", "metric"].map((name) => h("th", { scope: "col" }, name)), depths.map((name) => h("th", { scope: "col", class: "num" }, name)))),
    h("tbody", {}, rows.map(({ task, metric, at }) => h("tr", {}, h("td", {}, task ?? "–"), h("td", {}, metric ?? "–"), at.map(cell))))))];
}

export function runPage(main, run) {
  const log = `/workflows/-/steps/${run}`;
  const header = h("header", { class: "page-head" });
  const messages = h("div");
  const story = h("div");
  const controls = curveControls({ several: false });
  const grid = h("section", { class: "tiles run-tiles", "aria-label": "Curves" });
  const side = h("section");
  const tiles = new Map();
  const scores = h("div", { class: "table-wrap", tabindex: "0", role: "region", "aria-label": "Evaluations" });
  const showScores = sortable(scores);
  let body = null;
  const curvesBar = h("div", { class: "toolbar" }, h("h2", {}, "Curves"), h("span", { class: "grow" }), controls.element);
  fill(main, header, messages, story, curvesBar, grid, side);
  fill(messages, h("p", { class: "quiet-note loading" }, "Reading the run…"));
  document.title = `${run} · LT2`;

  const stop = poll(`/api/runs/${encodeURIComponent(run)}`, (found) => { body = found; show(); }, (error) => {
    fill(header, h("h1", {}, run));
    fill(messages, notice("error", "This run cannot be shown", error.message, h("a", { href: "/" }, "All runs")));
    curvesBar.hidden = grid.hidden = side.hidden = true;
  });

  function show() {
    curvesBar.hidden = grid.hidden = side.hidden = false;
    const state = stateOf(body);
    // By the pace of the last steps: the time since the start also holds what the run stood still.
    const left = state === "running" && body.total && body.seconds_per_step ? body.seconds_per_step * (body.total - body.step) : null;
    const { loss, validation_loss: validation, tokens_per_s: pace, mfu, data_wait_fraction: waiting, grad_spikes: spikes, peak_memory_gb: memory } = body.last;
    fill(header, h("nav", { class: "crumbs", "aria-label": "Path" }, h("a", { href: "/" }, "Runs"), " / "), h("h1", {}, run), status(state),
      facts([
        ["workflow", body.workflow ? h("a", { href: `/workflows/${body.workflow}` }, body.workflow) : null],
        ["step", state === "evaluated" ? null : body.total ? `${number(body.step)} of ${number(body.total)}` : number(body.step)],
        [body.loss_unit ? "loss (nats)" : "loss", known(loss)],
        ["validation loss (nats)", known(validation)],
        ["gradient spikes", known(spikes)],
        ["tokens/s", known(pace)],
        ["MFU", percent(mfu)],
        ["waiting for data", percent(waiting)],
        ["peak memory", typeof memory === "number" ? `${number(memory, 3)} GB` : null],
        ["attention in", body.attention_in],
        ["time", body.created ? duration(body.updated - body.created) : null],
        ["remaining", left === null ? null : `${duration(left)}, until ${date(body.updated + left)}`],
        ["started", body.created ? date(body.created) : null],
        ["last update", body.created ? ago(body.updated) : null],
        ["log", body.attempt ? h("a", { href: log }, "attempts and log") : null],
      ]));
    fill(messages, trouble(state, body.attempt, log),
      body.skipped.length ? notice("warn", "Some of this run's files could not be read and are missing from the curves", ...body.skipped) : null);
    fill(story, noted(body.notes), happened(body.events));
    drawTiles();
    fill(side, evaluations(), h("div", { class: "panels" }, panel("Settings", body.config, true), panel("Summary", body.summary), panel("Provenance", body.info)));
  }

  function drawTiles() {
    controls.sync();
    if (!body) return;
    const order = [...FIRST.filter((metric) => body.metrics.includes(metric)), ...body.metrics.filter((metric) => !FIRST.includes(metric))];
    if (!order.length) return fill(grid, h("p", { class: "quiet-note" }, body.created && body.status !== "finished" ? "Nothing is logged yet; curves appear with the first steps." : "No curves: no training logged any."));
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
    const draw = (text) => fill(list, keys.filter((key) => !text || `${key} ${values[key]}`.toLowerCase().includes(text)).map((key) => [h("dt", {}, parts(key)), h("dd", { title: values[key] }, values[key])]));
    draw(searchable ? wanted : "");
    const input = searchable ? h("input", { type: "search", placeholder: "Find a setting", "aria-label": "Find a setting", value: params().setting ?? "", oninput: (event) => { setParams({ setting: event.target.value }); draw(event.target.value.toLowerCase()); } }) : null;
    return h("section", { class: "panel" }, h("h2", {}, name, input), list);
  }

  // Readings at every (loop, layer), and at every position, are figures, not results.
  function evaluations() {
    const results = body.evals.filter((row) => row.layer === undefined && row.position === undefined);
    const links = [
      body.evals.some((row) => row.layer !== undefined) ? ["loop_diagnostics", "Unrolled diagnostics"] : null,
      body.evals.some((row) => row.position !== undefined) ? ["positions", "Loss by position"] : null,
      results.some((row) => row.metric?.endsWith("_tokens_per_s")) ? ["throughput", "Throughput"] : null,
      body.depths.rows.length ? ["depth", "Depth"] : null,
    ].filter(Boolean);
    if (!body.evals.length && !body.depths.rows.length) return null;
    const extra = [...new Set(["stderr", "n", "limit", "num_fewshot", ...results.flatMap((row) => Object.keys(row))])].filter((key) => !["name", "task", "metric", "value"].includes(key) && results.some((row) => row[key] !== null && row[key] !== "" && row[key] !== undefined));
    const columns = ["name", "task", "metric", "value", ...extra];
    const rows = results.map((row) => columns.map((column) => (/sha256$/.test(column) ? row[column]?.slice(0, 8) : row[column]) ?? null));
    showScores({ columns, rows });
    return h("section", { class: "panel" }, h("h2", {}, "Evaluations", h("span", { class: "links" }, links.map(([name, text]) => h("a", { href: `/figures/${name}?runs=${run}` }, text)))),
      results.length ? scores : null, byDepth(body.depths));
  }

  return { update: drawTiles, destroy() { stop(); for (const tile of tiles.values()) tile.destroy(); } };
}
