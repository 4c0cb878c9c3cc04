// A figure of the server on the page: chart, notes, the same numbers as a table, exports.

import { get, query } from "./api.js";
import { fill, h, notice, setText } from "./dom.js";
import { number } from "./format.js";
import { DARK, LIGHT, themed } from "./theme.js";

const mounted = new Set();
export const theme = () => (document.documentElement.dataset.theme === "dark" ? DARK : LIGHT);
export function repaint() { for (const chart of mounted) chart.paint(); }

const TABLE_ROWS = 500;

// options: small (a tile that links to its own page), group (charts that share a cursor), title (overrides the figure's)
export function figure(name, options = {}) {
  const canvas = h("div", { class: "canvas", role: "img" });
  const table = h("div", { class: "figure-table", hidden: true, tabindex: "0" });
  const notes = h("div", { class: "notes" });
  const title = h("a", { class: "figure-title" }, options.title ?? " ");
  const csv = h("a", { download: "", title: "Download the table as CSV" }, "CSV");
  const html = h("a", { download: "", title: "Download as one self-contained HTML file" }, "HTML");
  const toggle = h("button", { type: "button", class: "link", "aria-pressed": "false", onclick: () => showTable(table.hidden) }, "Table");
  const element = h("figure", { class: options.small ? "figure small" : "figure", "aria-busy": "true" },
    h("figcaption", {}, title, h("span", { class: "tools" }, toggle, csv, html)), canvas, table, notes);
  let chart = null, body = null, parameters = null, controller = null;

  function showTable(on) {
    table.hidden = !on;
    canvas.hidden = on;
    toggle.setAttribute("aria-pressed", String(on));
    if (on && body && !body.rows) load(parameters);
    else draw();
  }

  async function load(next) {
    parameters = next;
    const { points: _, ...shared } = next;
    const suffix = query(shared);
    title.setAttribute("href", `/figures/${name}${suffix}`);
    csv.setAttribute("href", `/api/figures/${name}.csv${suffix}`);
    html.setAttribute("href", `/api/figures/${name}.html${suffix}`);
    controller?.abort();
    controller = new AbortController();
    try {
      const bare = options.small && table.hidden ? { rows: "0" } : {};
      const answer = await get(`/api/figures/${name}${query({ ...next, ...bare })}`, controller.signal);
      if (!answer.changed && body === answer.body) return;
      body = answer.body;
      options.onBody?.(body);
      draw();
      element.removeAttribute("aria-busy");
    } catch (error) {
      if (error.name === "AbortError") return;
      body = null;
      clear();
      fill(notes, notice("error", "This figure cannot be drawn", error.message));
      element.removeAttribute("aria-busy");
    }
  }

  function draw() {
    if (!body) return;
    setText(title, options.title ?? body.title);
    canvas.setAttribute("aria-label", `${body.title}: chart; press Table for the numbers`);
    fill(notes, body.notes.map((note) => h("p", {}, note)));
    if (!table.hidden && body.rows) return void fill(table, numbers(body));
    if (body.option.empty) return clear(body.option.empty);
    paint();
  }

  function paint() {
    if (!body || canvas.hidden || body.option.empty) return;
    if (!chart) {
      fill(canvas);
      chart = echarts.init(canvas, null, { renderer: "canvas" });
      if (options.group) { chart.group = options.group; echarts.connect(options.group); }
    }
    chart.setOption(themed(body.option, theme(), { small: options.small }), { notMerge: true });
    element.dataset.ready = String(performance.now());
  }

  function clear(text) {
    chart?.dispose();
    chart = null;
    fill(canvas, text ? h("p", { class: "quiet-note" }, text) : null);
    if (text) element.dataset.ready = String(performance.now());
  }

  const observer = new ResizeObserver(() => chart?.resize());
  observer.observe(canvas);
  const self = {
    element, load, paint: draw,
    reload: () => parameters && load(parameters),
    option: () => chart?.getOption(),
    destroy() { observer.disconnect(); controller?.abort(); chart?.dispose(); mounted.delete(self); },
  };
  element.figure = self; // for tests and the console
  mounted.add(self);
  return self;
}

const isNumeric = (rows, index) => typeof rows.find((row) => row[index] !== null && row[index] !== undefined)?.[index] === "number";

export function numbers({ columns, rows }) {
  const shown = rows.slice(0, TABLE_ROWS);
  return [
    h("table", { class: "numbers" },
      h("thead", {}, h("tr", {}, columns.map((column, index) => h("th", { scope: "col", class: isNumeric(shown, index) ? "num" : "" }, column)))),
      h("tbody", {}, shown.map((row) => h("tr", {}, row.map((value, column) => h("td", { class: typeof value === "number" ? "num" : "" },
        columns[column] === "run" ? h("a", { href: `/runs/${value}` }, value) : number(value, 6))))))),
    rows.length > TABLE_ROWS ? h("p", { class: "quiet-note" }, `The first ${TABLE_ROWS} of ${rows.length.toLocaleString("en")} rows; CSV has all of them.`) : null,
  ];
}
