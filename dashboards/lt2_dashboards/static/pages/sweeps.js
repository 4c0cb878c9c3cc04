// One result of all runs that match a filter: by configuration over its seeds, and by the settings that vary.

import { get, query } from "../api.js";
import { figure, sortable } from "../chart.js";
import { fill, h } from "../dom.js";
import { params, setParams } from "../url.js";

export function sweepsPage(main) {
  const search = h("input", { type: "search", class: "search", placeholder: "Filter: words, lr>1e-3, layout.type=hybrid", "aria-label": "Filter runs", spellcheck: "false" });
  const metric = h("select", { "aria-label": "Result", onchange: () => setParams({ metric: metric.value }) });
  const chart = figure("sweep", { onBody: (body) => tell(body) });
  const means = figure("seeds", { onBody: (body) => { shown = body.columns[body.columns.indexOf("runs") + 1]; drawMetrics(); configurations.hidden = !body.rows.length; tellMeans(body); } });
  const configurations = h("div", { class: "table-wrap bounded", tabindex: "0", role: "region", "aria-label": "Configurations" });
  const table = h("div", { class: "table-wrap bounded", tabindex: "0", role: "region", "aria-label": "Runs" });
  const tellMeans = sortable(configurations), tell = sortable(table);
  const chips = h("div", { class: "chips", role: "group", "aria-label": "Sweeps of this store" });
  const sweeps = new Map(); // name -> trials
  let typing, known = [], shown = ""; // the result that is drawn where the address names none
  fill(main, h("header", { class: "page-head" }, h("h1", {}, "Sweeps")), chips, h("div", { class: "toolbar" }, search, h("label", { class: "controls" }, "result ", metric)), h("div", { class: "medium" }, means.element), configurations, h("div", { class: "medium" }, chart.element), table);
  search.addEventListener("input", () => { clearTimeout(typing); typing = setTimeout(() => setParams({ q: search.value.trim() }), 250); });
  const timer = setInterval(() => { if (!document.hidden) { means.reload(); chart.reload(); } }, 5000);

  // Trials are workflows called <sweep>-<trial>.
  function drawChips() {
    fill(chips, [...sweeps].map(([name, trials]) => {
      const filter = `workflow~${name}-`, on = params().q === filter;
      return h("button", { type: "button", class: "chip", "aria-pressed": String(on), title: on ? "Show all runs" : "Show the runs of its trials", onclick: () => setParams({ q: on ? "" : filter, metric: "" }) }, name, h("span", { class: "count" }, trials.toLocaleString("en")));
    }));
  }
  get("/api/workflows").then(({ body }) => {
    for (const { recipe, trials } of body.workflows) for (const count of Object.values(trials)) sweeps.set(recipe, (sweeps.get(recipe) ?? 0) + count);
    drawChips();
  }, () => {}); // without them one can still filter

  function drawMetrics() {
    const chosen = params().metric ?? shown;
    fill(metric, [...new Set([chosen, ...known])].filter(Boolean).map((name) => h("option", { value: name, selected: name === chosen }, name)));
  }

  function update() {
    const { q, metric: chosen } = params();
    if (document.activeElement !== search) search.value = q ?? "";
    drawMetrics();
    drawChips();
    get(`/api/runs${query({ q })}`).then(({ body }) => { known = body.metrics; drawMetrics(); }, () => {});
    means.load({ q, metric: chosen });
    chart.load({ q, metric: chosen });
  }
  update();
  return { update, destroy() { clearInterval(timer); clearTimeout(typing); means.destroy(); chart.destroy(); } };
}
