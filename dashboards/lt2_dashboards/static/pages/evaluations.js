// Downstream accuracy of this store's runs and of the paper's models, and the hybrid ablations.

import { poll, query } from "../api.js";
import { figure, sorted, theme } from "../chart.js";
import { fill, h, notice } from "../dom.js";
import { number } from "../format.js";
import { colour } from "../theme.js";
import { params, setParams } from "../url.js";

const SIZES = ["1.3B", "0.6B"];

export function evaluationsPage(main) {
  const sizes = h("div", { class: "chips", role: "group", "aria-label": "Size of the paper's models" });
  const chart = figure("downstream");
  const table = h("div", { class: "table-wrap", tabindex: "0", role: "region", "aria-label": "Accuracies" });
  const ratio = figure("hybrid", { small: true, legend: true }), pattern = figure("hybrid", { small: true, legend: true });
  let stop = () => {}, asked = null, body = null;
  fill(main, h("header", { class: "page-head" }, h("h1", {}, "Evaluations"), h("span", { class: "grow" }), h("span", { class: "faint" }, "beside the paper at"), sizes), h("div", { class: "medium" }, chart.element), table,
    h("h2", {}, "Hybrid ablations"), h("section", { class: "tiles two" }, ratio.element, pattern.element));

  function update() {
    const { size = SIZES[0], runs } = params();
    fill(sizes, SIZES.map((name) => h("button", { type: "button", class: "chip", "aria-pressed": String(name === size), onclick: () => setParams({ size: name === SIZES[0] ? "" : name }) }, name)));
    const suffix = query({ size, runs });
    if (suffix !== asked) {
      asked = suffix;
      stop();
      stop = poll(`/api/figures/downstream${suffix}`, (found) => { body = found; draw(); chart.load({ size, runs }); }, (error) => fill(table, notice("error", "The evaluations cannot be shown", error.message)), { every: 5000 });
    } else if (body) draw();
    ratio.load({ by: "ratio" });
    pattern.load({ by: "pattern" });
  }

  function draw() {
    const { rows } = body;
    const columns = body.columns.filter((name) => !name.endsWith(" ±"));
    const errorOf = (row, column) => row[body.columns.indexOf(`${columns[column]} ±`)] ?? null; // beside its number, not in a column of its own
    const sort = params().sort ?? "";
    const index = columns.indexOf(sort.replace(/^-/, ""));
    const sign = sort.startsWith("-") ? -1 : 1;
    const place = new Map(rows.map((row, position) => [row[0] + row[1], position])); // colours follow the chart
    const shown = sorted({ columns, rows }, index < 0 ? null : { column: index, down: sign < 0 }).rows;
    // The best of ours and the best of the paper's: perplexities of other data and tokenizers have another scale.
    const bestOf = (paper) => columns.map((name, column) => {
      const known = rows.filter((row) => (row[1] === "paper") === paper).map((row) => row[column]).filter((value) => typeof value === "number");
      return known.length < 2 ? undefined : name === "PPL" ? Math.min(...known) : Math.max(...known);
    });
    const best = { ours: bestOf(false), paper: bestOf(true) };
    const header = (name, column) => h("th", { scope: "col", class: column > 1 ? "num" : "", "aria-sort": index === column ? (sign < 0 ? "descending" : "ascending") : undefined },
      h("button", { type: "button", onclick: () => setParams({ sort: sort === `-${name}` ? name : `-${name}` }) }, name, h("span", { class: "arrow", "aria-hidden": "true" }, index === column ? (sign < 0 ? "↓" : "↑") : "")));
    fill(table, h("table", { class: "runs scores" }, h("thead", {}, h("tr", {}, columns.map(header))), h("tbody", {}, shown.map((row) => {
      const ours = row[1] !== "paper";
      return h("tr", { class: ours ? "ours" : "paper", style: ours ? { "--run": colour(theme(), place.get(row[0] + row[1])) } : {} },
        h("th", { scope: "row", class: "pick-name" }, ours ? h("a", { href: `/runs/${row[0]}` }, row[0]) : row[0]), h("td", { class: "faint" }, row[1]),
        row.slice(2, columns.length).map((value, at) => h("td", { class: `num${value !== null && value === best[ours ? "ours" : "paper"][at + 2] ? " best" : ""}` }, typeof value === "number" ? value.toFixed(2) : number(value),
          typeof errorOf(row, at + 2) === "number" ? h("small", {}, ` ± ${errorOf(row, at + 2).toFixed(2)}`) : null)));
    }))));
  }

  update();
  return { update, destroy() { stop(); for (const item of [chart, ratio, pattern]) item.destroy(); } };
}
