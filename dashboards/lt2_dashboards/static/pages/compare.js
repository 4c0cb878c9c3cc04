// Several runs side by side: first what differs between them.

import { get, poll, query } from "../api.js";
import { figure, theme } from "../chart.js";
import { coloursOf, curveControls, curveParams } from "../controls.js";
import { fill, h, notice, parts, status } from "../dom.js";
import { number } from "../format.js";
import { colour, dash } from "../theme.js";
import { params, setParams } from "../url.js";

const LOWER_IS_BETTER = /loss|ppl|perplexity|kl|^ce$|_time|wait|bytes|memory/i;
const HIGHER_IS_BETTER = /acc|score|tokens_per_s|mfu|recall|f1|em$/;
const TILES = ["loss", "validation_loss", "grad_norm", "tokens_per_s"];

export function comparePage(main) {
  const messages = h("div");
  const controls = curveControls();
  const table = h("div", { class: "table-wrap", tabindex: "0", role: "region", "aria-label": "Comparison" });
  const same = h("details", { class: "same", hidden: true });
  let colours = new Map(), recoloured = "[]"; // of seeds that are drawn as one line
  function recolour(found) {
    colours = coloursOf(found);
    const now = JSON.stringify([...colours]);
    if (now !== recoloured && body) { recoloured = now; show(); }
  }
  const tiles = TILES.map((metric) => [metric, figure("curves", { small: true, group: "compare", onBody: metric === TILES[0] ? recolour : undefined })]);
  const grid = h("section", { class: "tiles three", "aria-label": "Curves" }, tiles.map(([, tile]) => tile.element));
  const curvesBar = h("div", { class: "toolbar" }, h("h2", {}, "Curves"), h("span", { class: "grow" }), controls.element);
  const caveat = h("div", { class: "notes" });
  let body = null, asked = null, stop = () => {}, pairs = {}, pairsOf = null;
  fill(main, h("header", { class: "page-head" }, h("nav", { class: "crumbs", "aria-label": "Path" }, h("a", { href: "/" }, "Runs"), " / "), h("h1", {}, "What differs")),
    messages, table, caveat, same, curvesBar, grid);

  function update() {
    const runs = params().runs ?? "";
    if (runs !== asked) {
      asked = runs;
      body = null;
      stop();
      if (!runs) return show();
      fill(messages, h("p", { class: "quiet-note loading" }, "Reading the runs…"));
      stop = poll(`/api/compare${query({ runs })}`, (found) => { body = found; show(); }, (error) => {
        fill(messages, notice("error", "These runs cannot be compared", error.message, h("a", { href: "/" }, "All runs")));
        table.hidden = caveat.hidden = same.hidden = curvesBar.hidden = grid.hidden = true;
      });
    }
    drawTiles();
  }

  function show() {
    const few = !body || body.runs.length < 2;
    fill(messages, few ? notice("empty", "Select two or more runs", "Tick runs in the table of runs and press Compare.", h("a", { href: "/" }, "All runs")) : null);
    table.hidden = caveat.hidden = same.hidden = few;
    grid.hidden = curvesBar.hidden = few || !trained().length;
    if (few) return;
    askPairs();
    const drop = (run) => setParams({ runs: asked.split(",").filter((other) => other !== run).join(",") });
    const first = (run) => setParams({ runs: [run, ...asked.split(",").filter((other) => other !== run)].join(",") });
    const baseline = (run, index) => index ? h("button", { type: "button", class: "link", "aria-label": `Compare with ${run.run}`, onclick: () => first(run.run) }, "as baseline") : h("span", { class: "faint", title: "Percentages say how far the others are from this run" }, "baseline");
    const head = h("tr", {}, h("td", {}), body.runs.map((run, index) => h("th", { scope: "col", style: lineOf(run), class: "run-head" },
      h("a", { href: `/runs/${run.run}` }, run.run), h("span", {}, status(run.status), baseline(run, index), h("button", { type: "button", class: "link", "aria-label": `Take ${run.run} out`, onclick: () => drop(run.run) }, "remove")))));
    const group = (name, rows, make) => rows.length ? [h("tr", { class: "group" }, h("th", { colspan: body.runs.length + 1, scope: "colgroup" }, name)), rows.map(make)] : [];
    const settings = group("Settings that differ", body.differs, ({ key, values }) => h("tr", {}, h("th", { scope: "row" }, parts(key)), values.map((value) =>
      h("td", { class: value === null ? "faint" : "" }, value ?? "not set"))));
    // Losses of different objectives (next token, distance to a teacher) are not the same quantity, nor those at other depths.
    const differ = (setting) => body.differs.some(({ key }) => key.endsWith(setting));
    const apart = differ("objective.loops") ? ["loss", "ce"] : differ("objective.type") ? ["loss"] : [];
    const numbers = ({ key, values }) => {
      if (apart.includes(key)) return h("tr", {}, h("th", { scope: "row" }, parts(key)), values.map((value) => h("td", { class: "num" }, number(value))));
      const best = ["loss", "ce", "kl"].includes(key) && moved ? -1 : bestOf(key, values);
      return h("tr", {}, h("th", { scope: "row" }, parts(key)), values.map((value, index) => h("td", { class: `num${best === index ? " best" : ""}` }, number(value), delta(values, index))));
    };
    // A training loss is of one batch: the lowest of different steps is no merit of a run.
    const moved = new Set(trained().map(({ step }) => step)).size > 1;
    const steps = [{ key: "step", values: body.runs.map(({ status: state, step, total }) => (state === "evaluated" ? null : total ? `${number(step)} of ${number(total)}` : number(step))) }];
    const evaluations = (row) => {
      const { key, values, errors, items, data } = row;
      const same = new Set(items.filter((count, index) => typeof values[index] === "number")).size < 2;
      const one = new Set(data.filter((text, index) => typeof values[index] === "number" && text !== null)).size < 2;
      const best = same && one ? bestOf(key, values) : -1; // a quick look beside all items says nothing, nor other text
      const cell = (value, index) => {
        // Beside a number only: an evaluation that was cut off has items, but no result.
        const pair = typeof value === "number" ? pairs[body.runs[index].run]?.[key.split("/").slice(1).join("/")] : null;
        return h("td", { class: `num${best === index ? " best" : ""}` }, number(value), typeof errors[index] === "number" ? h("small", {}, `± ${number(errors[index], 2)}`) : null,
          same || items[index] === null ? null : h("small", {}, `${number(items[index])} items`),
          one || data[index] === null ? null : h("small", {}, `data ${data[index]}`), one ? delta(values, index) : null,
          pair ? h("small", { class: pair.p_value < 0.05 ? "sure" : "", title: `Over ${number(pair.n)} items that both answered: ${number(pair.difference, 3)} ± ${number(pair.stderr, 2)}` }, `p = ${pair.p_value < 0.001 ? "<0.001" : number(pair.p_value, 2)}`.replace("= <", "< ")) : null,
          pair?.note ? h("small", { class: "note" }, pair.note) : null);
      };
      return h("tr", {}, h("th", { scope: "row" }, parts(key)), values.map(cell));
    };
    const alike = body.elsewhere ? "Models that were evaluated, not trained, have no settings here to compare." : "These runs have the same settings here.";
    const nothing = body.differs.length ? null : h("tr", {}, h("td", { colspan: body.runs.length + 1 }, alike));
    fill(table, h("table", { class: "compare" }, h("thead", {}, head), h("tbody", {}, nothing, settings, ...[["Evaluations", false], ["Evaluations at several depths, and tables of sweeps", true]].map(([name, repeats]) => group(name, body.evals.filter(({ key }) => /^(depth|sweep)\//.test(key) === repeats), evaluations)), group("Last logged values", body.metrics.length ? [...steps, ...body.metrics] : [], numbers))));
    const keys = Object.keys(body.same);
    same.hidden = !keys.length;
    fill(same, h("summary", {}, `${keys.length} settings are the same`), h("dl", { class: "settings" }, keys.map((key) => [h("dt", {}, parts(key)), h("dd", {}, body.same[key])])));
    drawTiles();
  }

  // Models from elsewhere were evaluated only: they have no curves, and no colour of one.
  const trained = () => body.runs.filter((run) => run.status !== "evaluated");
  function lineOf(run) {
    const index = colours.get(run.run) ?? trained().indexOf(run);
    return index < 0 ? {} : { "--run": colour(theme(), index), "--run-line": dash(theme(), index) };
  }

  // Reads every item of the evaluations, so it is asked once, and again when there are others.
  function askPairs() {
    const now = JSON.stringify([asked, body.evals]);
    if (now === pairsOf) return;
    pairsOf = now;
    pairs = {};
    fill(caveat);
    get(`/api/significance${query({ runs: asked })}`).then(({ body: found }) => {
      if (now !== pairsOf) return; // other runs meanwhile
      pairs = found.pairs;
      fill(caveat, Object.keys(pairs).length ? h("p", {}, "± is one standard error. p: how often chance alone gives so large a difference from the first run on the items both answered; one in twenty is below 0.05 by chance. It says nothing about seeds: repeat the run for that.") : null,
        found.skipped.map((line) => h("p", {}, line)));
      show();
    }, (error) => fill(caveat, h("p", {}, `The significance of the differences is not known: ${error.message}`)));
  }

  // The difference from the first run, which is the baseline.
  function delta(values, index) {
    if (index === 0 || typeof values[0] !== "number" || typeof values[index] !== "number" || values[0] === values[index] || values[0] === 0) return null;
    const relative = (100 * (values[index] - values[0])) / Math.abs(values[0]);
    if (Math.abs(relative) >= 1000) return values[index] / values[0] > 0 ? h("small", {}, `× ${number(values[index] / values[0], 2)}`) : null;
    return h("small", {}, `${relative > 0 ? "+" : "−"}${Math.abs(relative) < 0.1 ? Math.abs(relative).toPrecision(1) : Math.abs(relative).toFixed(1)} %`);
  }

  function bestOf(key, values) {
    const sign = LOWER_IS_BETTER.test(key) ? -1 : HIGHER_IS_BETTER.test(key) ? 1 : 0;
    const known = values.filter((value) => typeof value === "number");
    if (!sign || known.length < 2 || new Set(known).size < 2) return -1;
    return values.indexOf(sign > 0 ? Math.max(...known) : Math.min(...known));
  }

  function drawTiles() {
    controls.sync();
    if (!body || body.runs.length < 2 || !trained().length) return;
    for (const [metric, tile] of tiles) tile.load({ runs: trained().map((run) => run.run).join(","), metric, ...curveParams() });
  }

  update();
  return { update, destroy() { stop(); for (const [, tile] of tiles) tile.destroy(); } };
}
