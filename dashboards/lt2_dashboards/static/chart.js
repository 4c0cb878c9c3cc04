// A figure of the server on the page: chart, notes, the same numbers as a table, exports.

import { connection, get, query } from "./api.js";
import { fill, h, notice, said, setText } from "./dom.js";
import { metricName, number, shortNames } from "./format.js";
import { bytes, DARK, LIGHT, rowsOf, themed } from "./theme.js";

const mounted = new Set();
export const theme = () => (document.documentElement.dataset.theme === "dark" ? DARK : LIGHT);
// At once: before printing no frame follows in which a chart could be drawn.
export function repaint() { for (const chart of mounted) chart.paint(true); }

const TABLE_ROWS = 500;
const PICTURE = { width: 720, height: 400, scale: 3 };

// options: small (a tile that links to its own page), legend (on a tile), group (charts that share a cursor),
// title (overrides the figure's), beside (the table is always shown, next to the chart)
export function figure(name, options = {}) {
  const canvas = h("div", { class: "canvas", role: "img" });
  const table = h("div", { class: "figure-table", hidden: !options.beside, tabindex: "0", role: "region", "aria-label": "Table of the figure" });
  const notes = h("div", { class: "notes" });
  const title = h("a", { class: "figure-title" }, options.title ?? " ");
  const badge = h("span", { class: "badge", hidden: true, title: "This store has no data for this figure yet" }, "paper only");
  const csv = h("a", { download: "", title: "Download the table as CSV" }, "CSV");
  const html = h("a", { download: "", title: "Download as one self-contained HTML file" }, "HTML");
  const pictures = ["png", "svg"].map((kind) => h("button", { type: "button", class: "link", title: `Download the chart as ${kind.toUpperCase()}, on white`, onclick: () => save(kind) }, kind.toUpperCase()));
  const toggle = h("button", { type: "button", class: "link", "aria-pressed": "false", onclick: () => showTable(table.hidden) }, "Table");
  const element = h("figure", { class: options.small ? "figure small" : options.beside ? "figure large beside" : "figure", "aria-busy": "true" },
    h("figcaption", {}, title, badge, h("span", { class: "tools" }, options.beside ? null : toggle, csv, pictures, html)), canvas, table, notes);
  let chart = null, body = null, bodyOf = null, away = false, parameters = null, controller = null;
  const fillTable = sortable(table);

  function showTable(on) {
    table.hidden = !on;
    canvas.hidden = on;
    toggle.setAttribute("aria-pressed", String(on));
    if (on && body && !body.rows) load(parameters);
    else draw();
  }

  // The figure's own page; it needs no telling how many points fit a tile.
  const address = (more = {}) => `/figures/${name}${query({ ...parameters, points: undefined, ...more })}`;

  async function load(next) {
    parameters = next;
    const { points: _, ...shared } = next;
    const suffix = query(shared);
    title.setAttribute("href", address());
    csv.setAttribute("href", `/api/figures/${name}.csv${suffix}`);
    html.setAttribute("href", `/api/figures/${name}.html${suffix}`);
    controller?.abort();
    controller = new AbortController();
    try {
      const bare = options.small && table.hidden ? { rows: "0" } : {};
      const answer = await get(`/api/figures/${name}${query({ ...next, ...bare })}`, controller.signal);
      if (away) connection(null);
      away = false;
      if (!answer.changed && body === answer.body) return;
      body = answer.body;
      bodyOf = address();
      if (!table.hidden && !body.rows) return void load(parameters); // "Table" was pressed while this was on its way
      options.onBody?.(body);
      draw();
      element.removeAttribute("aria-busy");
    } catch (error) {
      if (error.name === "AbortError") return;
      if (error.away && body && bodyOf === address()) { // what is drawn stays until the server is back
        away = true;
        return connection(error);
      }
      body = null;
      clear();
      fill(notes);
      fill(table);
      fill(canvas.hidden ? notes : canvas, notice("error", "This figure cannot be drawn", error.message));
      element.removeAttribute("aria-busy");
    }
  }

  function draw(now = false) {
    if (!body) return;
    setText(title, options.title ?? body.title);
    title.title = title.textContent; // a narrow tile cuts it off
    canvas.setAttribute("aria-label", `${body.title}: chart; press Table for the numbers`);
    element.classList.toggle("nothing", Boolean(body.option.empty));
    badge.hidden = !body.produce || Boolean(body.option.empty);
    fill(notes, body.produce && !body.option.empty ? produced(body.produce) : null, body.notes.map((note) => h("p", {}, said(note), body.links[note] ? [" ", h("a", { href: address(body.links[note]) }, "Show it")] : null)));
    element.style.setProperty("--rows", String(options.small ? 1 : rowsOf(body.option, canvas.clientWidth || undefined)));
    if (!table.hidden && body.rows) body.rows.length ? fillTable(body) : fill(table);
    if (canvas.hidden) return;
    if (body.option.empty) return clear(body.option.empty, body.produce);
    paint();
    if (now) chart?.getZr().flush();
  }

  function paint() {
    if (!body || canvas.hidden || body.option.empty) return;
    if (!canvas.isConnected) return; // the page was left while the answer was on its way
    if (!chart) {
      fill(canvas);
      chart = echarts.init(canvas, null, { renderer: "canvas" });
      if (options.group) { chart.group = options.group; echarts.connect(options.group); }
    }
    chart.setOption(themed(body.option, theme(), { small: options.small, legend: options.legend ?? !options.small, width: canvas.clientWidth || undefined, height: canvas.clientHeight || undefined }), { notMerge: true });
    element.dataset.ready = String(performance.now());
  }

  // The chart by itself, for a paper or slides: light whatever the page is, and never narrower than a column of text.
  function save(kind) {
    if (!body || body.option.empty) return;
    const size = { width: Math.max(canvas.clientWidth, PICTURE.width), height: Math.max(canvas.clientHeight, PICTURE.height * rowsOf(body.option)) };
    const drawn = echarts.init(h("div"), null, kind === "svg" ? { renderer: "svg", ssr: true, ...size } : { devicePixelRatio: PICTURE.scale, ...size });
    drawn.setOption(themed(alone(body), LIGHT, { width: size.width }));
    const address = kind === "svg" ? URL.createObjectURL(new Blob([drawn.renderToSVGString()], { type: "image/svg+xml" })) : drawn.getDataURL({ type: "png", pixelRatio: PICTURE.scale, backgroundColor: LIGHT.panel });
    drawn.dispose();
    h("a", { href: address, download: `${[name, parameters.metric].filter(Boolean).join("-").replaceAll("/", "-")}.${kind}` }).click();
  }

  function clear(text, command) {
    chart?.dispose();
    chart = null;
    fill(canvas, text ? h("div", { class: "quiet-note" }, h("p", {}, text), command ? h("p", {}, "To produce it: ", h("code", {}, command)) : null) : null);
    if (text) element.dataset.ready = String(performance.now());
  }

  const observer = new ResizeObserver(() => chart?.resize());
  observer.observe(canvas);
  const self = {
    element, load, paint: draw,
    reload: () => parameters && load(parameters),
    option: () => chart?.getOption(),
    destroy() { observer.disconnect(); controller?.abort(); chart?.dispose(); mounted.delete(self); if (away) connection(""); },
  };
  element.figure = self; // for tests and the console
  mounted.add(self);
  return self;
}

// A chart without its title says on its axis what it shows.
function alone({ title, option }) {
  const { yAxis } = option;
  return !option.panels && yAxis && !Array.isArray(yAxis) && yAxis.type !== "category" && !yAxis.name ? { ...option, yAxis: { ...yAxis, name: title } } : option;
}

const produced = (command) => h("div", { class: "produce" }, "This store has no data for this figure yet. To produce it: ", h("code", {}, command));

// A column of nothing but gaps stands as the one before it does: there it is numbers that nobody has yet.
function isNumeric(rows, index) {
  const first = rows.find((row) => row[index] !== null && row[index] !== undefined && !/^(NaN|-?inf)$/.test(row[index]));
  return first ? typeof first[index] === "number" : index > 0 && isNumeric(rows, index - 1);
}

// Empty cells stay at the end whichever way a column is sorted.
export function sorted({ columns, rows }, by) {
  if (!by) return { columns, rows };
  const sign = by.down ? -1 : 1;
  const order = (a, b) => (typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b), "en", { numeric: true }));
  const empty = (value) => value === null || value === undefined || value === "";
  return { columns, rows: [...rows].sort((a, b) => {
    const [x, y] = [a[by.column], b[by.column]];
    return empty(x) || empty(y) ? empty(x) - empty(y) : sign * order(x, y);
  }) };
}

// One number of decimals for a column, about five digits of a usual value, four from 100 on, so that points stand under each
// other: a run that has diverged does not take the digits of the others. Where values are too far apart for that, each has
// its own, with `digits` in all.
export function aligned(values, digits = 6) {
  const known = values.filter((value) => typeof value === "number" && value !== 0).map(Math.abs).sort((a, b) => a - b);
  const usual = known[known.length >> 1] ?? 0, far = (value) => Math.abs(value) > Math.min(1e3 * usual, 1e5);
  if (usual >= 1e5) return (value) => number(Math.abs(value) >= 1e5 ? Math.round(value) : value, digits); // 1,655,307 below 1,654,152
  if (known.every(Number.isInteger) || known[0] < 1e-3) return (value) => number(value, digits);
  const decimals = Math.max(0, Math.min(5, (usual < 100 ? 4 : 3) - Math.floor(Math.log10(usual))));
  if (known[0] < 10 ** (1 - decimals)) return (value) => number(value); // accuracies beside tokens/s: one digit would be left of them
  const needed = Math.max(...known.filter((value) => !far(value)).map((value) => (String(Number(value.toFixed(decimals))).split(".")[1] ?? "").length));
  return (value) => (typeof value !== "number" || far(value) ? number(value) : value.toLocaleString("en", { minimumFractionDigits: needed, maximumFractionDigits: needed }));
}

// Returns a function that fills `parent` with a table; a press on a column's name sorts it, also what is shown later.
export function sortable(parent) {
  let body = null, sorting = null;
  function show() {
    const kept = document.activeElement?.closest?.("th")?.cellIndex, inside = parent.contains(document.activeElement);
    fill(parent, numbers(sorted(body, sorting), sorting, (column) => {
      sorting = sorting?.column === column ? (sorting.down ? { column, down: false } : null) : { column, down: true };
      show();
    }));
    if (inside && kept !== undefined) parent.querySelectorAll("thead button")[kept]?.focus();
  }
  return (found) => { body = found; show(); };
}

const SETTING = /^\w+(\.\w+)+$/; // a column that is a setting: train.lr
const RESULT = /^[\w-]+(\/[\w@,. -]{2,})+$/; // or a result: validation/perplexity/loss, but not tokens/s

const LISTS_RUNS = new Set(["names", "runs"]);

// sort(column), if given, is called when a column's name is pressed; `sorting` says how the rows are sorted now.
export function numbers({ columns, rows }, sorting = null, sort = null) {
  const shown = rows.slice(0, TABLE_ROWS);
  const numeric = columns.map((_, index) => isNumeric(shown, index));
  const source = columns.indexOf("source");
  const first = columns[0] === "model";
  const short = shortNames(columns.filter((column) => SETTING.test(column)));
  for (const column of columns) if (RESULT.test(column)) short.set(column, metricName(column));
  const head = (column, index) => {
    const text = short.get(column) ?? column;
    if (!sort) return text;
    const arrow = sorting?.column === index ? (sorting.down ? " ↓" : " ↑") : "";
    return h("button", { type: "button", class: "link", onclick: () => sort(index) }, text, arrow);
  };
  // Of a column "value" each row is of another metric: decimals that suit a count would cut an accuracy.
  const shape = columns.map((column, index) => (column.endsWith("(bytes)") ? (value) => (value === null ? "–" : bytes(value)) : numeric[index] && column !== "value" ? aligned(shown.map((row) => row[index])) : (value) => number(value, 6)));
  const cell = (value, column, row) => {
    if (LISTS_RUNS.has(columns[column]) && typeof value === "string") return h("td", {}, value.split(", ").flatMap((run, at) => [at ? ", " : null, h("a", { href: `/runs/${run}` }, run)]));
    const isRun = value !== null && (columns[column] === "run" || (first && column === 0 && row[source]?.startsWith("this store") && !value.startsWith("mean of ")));
    return h("td", { class: numeric[column] ? "num" : "" }, isRun ? h("a", { href: `/runs/${value}`, title: value }, value) : shape[column](value));
  };
  return [
    h("table", { class: "numbers" },
      h("thead", {}, h("tr", {}, columns.map((column, index) => h("th", { scope: "col", class: numeric[index] ? "num" : "", title: short.has(column) ? column : undefined, "aria-sort": sorting?.column === index ? (sorting.down ? "descending" : "ascending") : undefined }, head(column, index))))),
      h("tbody", {}, shown.map((row) => h("tr", { class: source >= 0 && row[source] === "paper" ? "paper" : "" }, row.map((value, column) => cell(value, column, row)))))),
    rows.length > TABLE_ROWS ? h("p", { class: "quiet-note" }, `The first ${TABLE_ROWS} of ${rows.length.toLocaleString("en")} rows; CSV has all of them.`) : null,
  ];
}
