// The front page: curves of the selected runs above the table of all runs.

import { poll, query } from "../api.js";
import { aligned, figure, theme } from "../chart.js";
import { coloursOf, curveControls, curveParams } from "../controls.js";
import { fill, h, notice, setText, status } from "../dom.js";
import { ago, brief, date, duration, metricName, number, shortNames } from "../format.js";
import { colour } from "../theme.js";
import { go, params, setParams } from "../url.js";

const TILES = ["loss", "validation_loss", "grad_norm", "lr", "tokens_per_s", "step_time"]; // the first five that are logged
const USUAL_TILES = 5;
const STATUSES = ["running", "stalled", "finished", "failed"];
const SHOWN_BY_ITSELF = 5; // runs drawn when none is selected
const MAX_SELECTED = 20;
const MAX_CHARTS = 13;
const COLUMNS = 8; // differing settings shown before "columns" is used
const METRICS = ["loss", "tokens_per_s"];
const HEADLINE = /ppl|perplexity|average/;

const toggled = (list, item) => (list.includes(item) ? list.filter((other) => other !== item) : [...list, item]);

export function runsPage(main) {
  const state = { body: null, colours: new Map() };
  const search = h("input", { type: "search", class: "search", placeholder: "Filter: words, lr>1e-3, layout.ratio=1:4, loss<3", "aria-label": "Filter runs", spellcheck: "false", autocomplete: "off" });
  const chips = h("div", { class: "chips", role: "group", "aria-label": "Status" });
  const controls = curveControls();
  const columns = h("details", { class: "menu" }, h("summary", {}, "Columns"));
  const compare = h("a", { class: "button off" }, "Compare");
  const charts = h("details", { class: "menu" }, h("summary", {}, "Charts"));
  const tiles = new Map(); // metric -> figure
  const grid = h("section", { class: "tiles", "aria-label": "Curves of the selected runs" });
  const head = h("tr");
  const bodyRows = h("tbody");
  const table = h("div", { class: "table-wrap", hidden: true }, h("table", { class: "runs" }, h("thead", {}, head), bodyRows));
  const foot = h("div", { class: "foot" });
  const messages = h("div");
  const rows = new Map(); // run -> { tr, cells }
  let stop = () => {}, typing;

  fill(main, h("h1", { class: "hidden" }, "Runs"),
    h("div", { class: "toolbar" }, search, chips, h("span", { class: "grow" }), charts, columns, controls.element, compare),
    messages, grid, table, foot);
  fill(messages, h("p", { class: "quiet-note loading" }, "Reading the results store…"));

  search.addEventListener("input", () => { clearTimeout(typing); typing = setTimeout(() => setParams({ q: search.value.trim(), page: "" }), 250); });
  search.addEventListener("keydown", (event) => { if (event.key === "Escape") search.blur(); });

  function selection() {
    const given = params().sel;
    if (given !== undefined) return given === "none" ? [] : given.split(",").slice(0, MAX_SELECTED);
    return (state.body?.rows ?? []).slice(0, SHOWN_BY_ITSELF).map((row) => row.run);
  }

  function select(run) {
    const now = selection();
    const next = now.includes(run) ? now.filter((other) => other !== run) : [...now, run].slice(-MAX_SELECTED);
    setParams({ sel: next.join(",") || "none" });
  }

  function ask() {
    const { q, status: wanted, sort, page } = params();
    if (document.activeElement !== search) search.value = q ?? "";
    stop();
    stop = poll(`/api/runs${query({ q, status: wanted, sort, page })}`, show, (error) => {
      state.body = null;
      fill(messages, notice("error", "The runs cannot be shown", error.message));
      grid.hidden = table.hidden = true;
    });
  }

  function show(body) {
    state.body = body;
    const none = body.total === 0;
    grid.hidden = table.hidden = foot.hidden = none;
    fill(messages, none ? emptyNote(body) : null, body.skipped.map((line) => notice("warn", line)));
    draw();
  }

  function draw() {
    if (!state.body) return;
    controls.sync();
    drawChips();
    drawColumns();
    drawCharts();
    drawTable();
    drawTiles();
    const selected = selection();
    compare.setAttribute("href", `/compare?runs=${selected.join(",")}`);
    setText(compare, `Compare ${selected.length}`);
    compare.classList.toggle("off", selected.length < 2);
  }

  function drawChips() {
    const wanted = (params().status ?? "").split(",").filter(Boolean);
    const chip = (name, text, count, on, next) => h("button", { type: "button", class: "chip", "aria-pressed": String(on), onclick: () => setParams({ status: next, page: "" }) },
      name ? status(name) : text, h("span", { class: "count" }, count.toLocaleString("en")));
    const all = Object.values(state.body.counts).reduce((sum, count) => sum + count, 0);
    const made = [chip("", "all", all, !wanted.length, "")];
    for (const name of STATUSES) {
      const count = state.body.counts[name] ?? 0;
      const on = wanted.includes(name);
      if (count || on) made.push(chip(name, name, count, on, (on ? wanted.filter((w) => w !== name) : [...wanted, name]).join(",")));
    }
    const focused = [...chips.children].indexOf(document.activeElement);
    fill(chips, made);
    if (focused >= 0) chips.children[focused]?.focus();
  }

  function shownColumns() {
    const { cols } = params();
    const { varying, metrics } = state.body;
    if (cols !== undefined) return cols.split(",").filter((key) => varying.includes(key) || metrics.includes(key));
    const evaluations = metrics.filter((metric) => metric.includes("/")).sort((a, b) => HEADLINE.test(b) - HEADLINE.test(a)).slice(0, 2);
    return [...METRICS.filter((metric) => metrics.includes(metric)), ...evaluations, ...varying.slice(0, COLUMNS)];
  }

  function drawColumns() {
    if (columns.open && columns.contains(document.activeElement)) return;
    const shown = shownColumns();
    const toggle = (key) => setParams({ cols: toggled(shownColumns(), key).join(",") || "none" });
    const group = (name, keys) => keys.length ? h("fieldset", {}, h("legend", {}, name), keys.map((key) =>
      h("label", {}, h("input", { type: "checkbox", checked: shown.includes(key), onchange: () => toggle(key) }), key))) : null;
    fill(columns, h("summary", {}, "Columns"), h("div", { class: "sheet" },
      group("Results", state.body.metrics), group("Settings that differ", state.body.varying),
      h("button", { type: "button", class: "link", onclick: () => setParams({ cols: "" }) }, "Default columns")));
  }

  function shownCharts() {
    const given = params().charts;
    if (given !== undefined) return given.split(",").slice(0, MAX_CHARTS);
    return TILES.filter((metric) => metric === TILES[0] || state.body.logged.includes(metric)).slice(0, USUAL_TILES);
  }

  function drawCharts() {
    if (charts.open && charts.contains(document.activeElement)) return;
    const shown = shownCharts();
    const toggle = (metric) => setParams({ charts: toggled(shownCharts(), metric).join(",") });
    fill(charts, h("summary", {}, "Charts"), h("div", { class: "sheet" }, h("fieldset", {}, h("legend", {}, "Curves above the table"), [...new Set([...shown, ...state.body.logged])].map((metric) =>
      h("label", {}, h("input", { type: "checkbox", checked: shown.includes(metric), onchange: () => toggle(metric) }), metric))),
    h("button", { type: "button", class: "link", onclick: () => setParams({ charts: "" }) }, "Usual charts")));
  }

  function drawTable() {
    const { varying, rows: found } = state.body;
    const keys = shownColumns();
    const names = shortNames(keys.filter((key) => varying.includes(key)));
    const sort = params().sort ?? "-created";
    const header = (key, text, kind, title) => {
      const active = sort.replace(/^-/, "") === key;
      const down = sort.startsWith("-");
      const next = active ? (down ? key : `-${key}`) : kind === "num" ? key : `-${key}`;
      return h("th", { scope: "col", class: kind, "aria-sort": active ? (down ? "descending" : "ascending") : undefined },
        h("button", { type: "button", title: title ?? key, onclick: () => setParams({ sort: next, page: "" }) }, text, h("span", { class: "arrow", "aria-hidden": "true" }, active ? (down ? "↓" : "↑") : "")));
    };
    const focusedHeader = [...head.querySelectorAll("button")].indexOf(document.activeElement);
    const inWorkflow = found.some((row) => row.workflow), noted = found.some((row) => row.note);
    fill(head, h("th", { class: "pick", scope: "col" }, h("span", { class: "hidden" }, "Selected")), header("run", "run", "name"), inWorkflow ? header("workflow", "workflow") : null, header("status", "status"), header("step", "progress", "num"), header("created", "started", "num"), noted ? header("note", "note", "") : null,
      keys.map((key) => header(key, names.get(key) ?? metricName(key), varying.includes(key) ? "" : "num")));
    if (focusedHeader >= 0) head.querySelectorAll("button")[focusedHeader]?.focus();
    const selected = selection();
    const layout = [inWorkflow, noted, ...keys].join("\n");
    for (const [run, row] of rows) if (row.layout !== layout || !found.some((other) => other.run === run)) { row.tr.remove(); rows.delete(run); }
    const shapes = new Map(keys.filter((key) => !varying.includes(key)).map((key) => [key, aligned(found.map((row) => row.numbers[key]), 4)]));
    found.forEach((row, index) => {
      let line = rows.get(row.run);
      if (!line) rows.set(row.run, (line = makeRow(row, keys, layout, inWorkflow, noted)));
      if (bodyRows.children[index] !== line.tr) bodyRows.insertBefore(line.tr, bodyRows.children[index] ?? null);
      updateRow(line, row, keys, shapes, selected.indexOf(row.run));
    });
    drawFoot();
  }

  function makeRow(row, keys, layout, inWorkflow, noted) {
    const box = h("input", { type: "checkbox", "aria-label": `Draw ${row.run}`, onchange: () => select(row.run) });
    const badge = h("td", {});
    const bar = h("span", { class: "progress" }, h("i"));
    const step = h("span"), left = h("small", { class: "faint" });
    const cells = keys.map((key) => h("td", { class: state.body.varying.includes(key) ? "setting" : "num" }));
    const age = h("td", { class: "num faint" });
    const note = noted ? h("td", { class: "setting" }) : null;
    const workflow = inWorkflow ? h("td", { class: "setting" }, row.workflow ? h("a", { href: `/workflows/${row.workflow}`, title: row.workflow }, row.workflow) : "–") : null;
    const tr = h("tr", { dataset: { run: row.run } }, h("td", { class: "pick" }, box), h("th", { scope: "row" }, h("a", { href: `/runs/${row.run}`, title: row.run }, row.run)), workflow, badge,
      h("td", { class: "num" }, left, step, bar), age, note, cells);
    return { tr, box, badge, bar, step, left, cells, age, note, layout };
  }

  function updateRow(line, row, keys, shapes, position) {
    line.box.checked = position >= 0;
    line.tr.classList.toggle("selected", position >= 0);
    if (position >= 0) line.tr.style.setProperty("--run", colour(theme(), state.colours.get(row.run) ?? position));
    else line.tr.style.removeProperty("--run");
    if (line.badge.dataset.state !== row.status) { fill(line.badge, status(row.status)); line.badge.dataset.state = row.status; }
    const left = row.status === "running" && row.total > row.step && row.numbers.step_time * (row.total - row.step);
    setText(line.left, left ? `about ${duration(left).split(" ").slice(0, 2).join(" ")} left · ` : "");
    setText(line.step, row.total ? `${number(row.step)} / ${number(row.total)}` : number(row.step));
    line.bar.hidden = !row.total || !["running", "stalled"].includes(row.status);
    line.bar.firstChild.style.setProperty("width", `${Math.min(100, (100 * (row.step + 1)) / (row.total || 1))}%`);
    keys.forEach((key, index) => setText(line.cells[index], state.body.varying.includes(key) ? brief(row.config[key] ?? "–") : shapes.get(key)(row.numbers[key])));
    keys.forEach((key, index) => { line.cells[index].title = row.config[key] ?? row.numbers[key] ?? ""; });
    if (line.note) { setText(line.note, row.note); line.note.title = row.note; }
    setText(line.age, ago(row.created));
    line.age.title = date(row.created);
  }

  function drawFoot() {
    const { total, all, page, page_size: size, rows: found } = state.body;
    const { q, status: wanted, sort } = params();
    const from = (page - 1) * size;
    const turn = (to, text, off) => h("button", { type: "button", disabled: off, onclick: () => setParams({ page: to > 1 ? to : "" }, { replace: false }) }, text);
    fill(foot, h("span", {}, total ? `${(from + 1).toLocaleString("en")}–${(from + found.length).toLocaleString("en")} of ${total.toLocaleString("en")}` : "", total < all ? `, filtered from ${all.toLocaleString("en")}` : ""),
      total > size ? [turn(page - 1, "Previous", page <= 1), turn(page + 1, "Next", from + found.length >= total)] : null,
      total ? h("a", { href: `/api/runs.csv${query({ q, status: wanted, sort })}`, download: "", title: "Download all runs that match, with every setting in which they differ and every result" }, "CSV") : null,
      h("span", { class: "grow" }),
      params().sel !== undefined ? h("button", { type: "button", class: "link", onclick: () => setParams({ sel: "" }) }, `Draw the first ${SHOWN_BY_ITSELF}`) : null,
      selection().length ? h("button", { type: "button", class: "link", onclick: () => setParams({ sel: "none" }) }, "Select none") : null);
  }

  function drawTiles() {
    const runs = selection();
    const missing = !runs.length;
    grid.classList.toggle("idle", missing);
    if (missing) return;
    const shown = shownCharts();
    for (const [metric, tile] of tiles) if (!shown.includes(metric)) { tile.destroy(); tiles.delete(metric); }
    for (const metric of shown) if (!tiles.has(metric)) tiles.set(metric, figure("curves", { small: true, group: "runs", onBody: recolour }));
    const drawn = JSON.stringify([runs, params().seeds]);
    if (state.drawn !== drawn) { state.drawn = drawn; state.colours.clear(); }
    const elements = shown.map((metric) => tiles.get(metric).element);
    if (elements.length !== grid.children.length || elements.some((element, index) => grid.children[index] !== element)) fill(grid, elements);
    for (const metric of shown) tiles.get(metric).load({ runs: runs.join(","), metric, ...curveParams(), ...(metric === shown[0] ? { points: 1500 } : {}) });
  }

  // Names have the colours of their lines, also where several seeds are one.
  function recolour(body) {
    const found = coloursOf(body);
    if (![...found].some(([run, index]) => state.colours.get(run) !== index)) return;
    for (const [run, index] of found) state.colours.set(run, index);
    drawTable();
  }

  function emptyNote(body) {
    if (body.all === 0) {
      return notice("empty", "No runs yet", `Nothing has been logged under ${body.root}.`, "Start one with:  lt2 run quickstart", "It appears here within seconds; this page updates itself.");
    }
    return h("div", { class: "notice empty" }, h("strong", {}, "No run matches"), h("p", {}, `${body.all.toLocaleString("en")} runs are in the store.`),
      h("button", { type: "button", onclick: () => { search.value = ""; setParams({ q: "", status: "", page: "" }); } }, "Clear the filter"));
  }

  function key(pressed) {
    const lines = [...bodyRows.children];
    const at = lines.findIndex((line) => line.contains(document.activeElement));
    const moveTo = (index) => lines[Math.max(0, Math.min(lines.length - 1, index))]?.querySelector("th a").focus();
    if (pressed === "/") return search.focus(), search.select(), true;
    if (pressed === "j" || pressed === "k") return moveTo(at + (pressed === "j" ? 1 : -1)), true;
    if (pressed === "x" && at >= 0) return select(lines[at].dataset.run), true;
    if (pressed === "c" && selection().length > 1) return go(`/compare?runs=${selection().join(",")}`), true;
    return false;
  }

  let asked;
  function update() {
    const { q, status: wanted, sort, page } = params();
    const now = JSON.stringify([q, wanted, sort, page]);
    if (now !== asked) { asked = now; ask(); }
    draw();
  }
  update();
  const clock = setInterval(draw, 30000); // "3 min ago" goes on even when nothing is logged
  return { update, key, destroy() { stop(); clearInterval(clock); clearTimeout(typing); for (const tile of tiles.values()) tile.destroy(); } };
}
