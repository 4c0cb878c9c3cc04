// Workflows: the list, the graph of one with the states of its steps, and a step's attempts and log.

import { poll } from "../api.js";
import { facts, fill, h, notice, setText, status, svg } from "../dom.js";
import { ago, date, duration, number } from "../format.js";
import { params, setParams } from "../url.js";

const MAX_LINES = 20; // damaged records named in one notice
const NODE = { width: 196, height: 54, gapX: 56, gapY: 16 };

export function workflowsPage(main) {
  const list = h("div", {}, h("p", { class: "quiet-note loading" }, "Reading workflows…"));
  fill(main, h("header", { class: "page-head" }, h("h1", {}, "Workflows")), list);
  const stop = poll("/api/workflows", (found) => fill(list, found.workflows.length || found.skipped.length ? listed(found) : notice("empty", "No workflows yet", "A workflow appears here as soon as it starts:", "lt2 run quickstart")),
    (error) => fill(list, notice("error", "The workflows cannot be shown", error.message)));
  return { destroy: stop };
}

// Whatever a damaged record says is unknown, so what stands below may be wrong or missing.
const unreadable = (lines) => lines.length ? notice("warn", `${plural(lines.length, "record")} cannot be read`, ...lines.slice(0, MAX_LINES), ...(lines.length > MAX_LINES ? [`and ${number(lines.length - MAX_LINES)} more`] : [])) : null;

const listed = ({ workflows, trials, skipped, left_out: more }) => [
  unreadable(skipped),
  table(["workflow", "state", "steps", "last activity", "why"], workflows.map((workflow) => [...cells(workflow),
    h("td", { class: "faint" }, workflow.states.includes("running") ? "now" : workflow.updated ? ago(workflow.updated) : "not started"), why(workflow)])),
  trials ? h("p", { class: "quiet-note" }, `${plural(trials, "trial")} of sweeps ${trials === 1 ? "is" : "are"} not in this list: the sweep's own page shows them.`) : null,
  more ? h("p", { class: "quiet-note" }, `${plural(more, "more workflow")} whose last activity is older ${more === 1 ? "is" : "are"} not shown.`) : null,
];

// When a step or an attempt ended; of one that was lost nobody knows.
const endOf = ({ state, ended }) => ended ?? (state === "running" ? Date.now() / 1000 : null);
const timeOf = (step) => (step.started && endOf(step) !== null ? duration(endOf(step) - step.started) : "");

const plural = (count, name) => `${number(count)} ${name}${count === 1 ? "" : "s"}`;

const table = (columns, rows) => h("div", { class: "table-wrap" }, h("table", { class: "numbers" },
  h("thead", {}, h("tr", {}, columns.map((name) => h("th", { scope: "col" }, name)))),
  h("tbody", {}, rows.map((row) => h("tr", {}, row)))));

const why = ({ error }) => h("td", { class: "why faint", title: error ?? "" }, error ?? "");

const cells = ({ id, state, states, trials }) => [
  h("th", { scope: "row" }, h("a", { href: `/workflows/${id}` }, id)),
  h("td", {}, status(state)),
  h("td", {}, h("span", { class: "beads", title: states.join(", ") }, states.map((each) => h("i", { class: `bead ${each}` }))), ` ${states.filter((each) => each === "done").length} of ${states.length} done`,
    Object.entries(trials ?? {}).map(([step, count]) => [" · ", h("a", { href: `/workflows/${id}/steps/${step}` }, plural(count, "trial"))])),
];

export function workflowPage(main, id, stepId) {
  const header = h("header", { class: "page-head" });
  const messages = h("div");
  const graph = h("div", { class: "graph", tabindex: "0", "aria-label": "Steps" });
  const panel = h("div");
  let stopStep = () => {}, shown = null, chosen = stepId, body = null;
  fill(main, header, messages, graph, panel);
  const heading = (name) => [h("nav", { class: "crumbs", "aria-label": "Path" }, h("a", { href: "/workflows" }, "Workflows"), " / "), h("h1", {}, name)];
  fill(header, heading(id === "-" ? stepId : id));
  if (id !== "-") fill(messages, h("p", { class: "quiet-note loading" }, "Reading the workflow…"));
  document.title = `${id === "-" ? stepId : id} · LT2`;
  const stop = id === "-" ? () => {} : poll(`/api/workflows/${encodeURIComponent(id)}`, (found) => { body = found; show(); }, (error) => {
    fill(messages, notice("error", "This workflow cannot be shown", error.message, h("a", { href: "/workflows" }, "All workflows")));
    graph.hidden = true;
  });
  graph.hidden = id === "-";

  function show() {
    graph.hidden = false;
    fill(messages, unreadable(body.skipped));
    const done = body.steps.filter((step) => step.state === "done").length;
    const busy = body.steps.filter((step) => step.started).map((step) => [step.started, endOf(step) ?? step.started]);
    fill(header, heading(body.id), status(body.state),
      facts([["trial of", body.part_of ? h("a", { href: `/workflows/-/steps/${body.part_of}` }, body.part_of) : null], ["steps", `${done} of ${body.steps.length} done`], ["started", busy.length ? date(Math.min(...busy.map(([from]) => from))) : null], ["time in steps", busy.length ? duration(busy.reduce((sum, [from, to]) => sum + to - from, 0)) : null]]));
    drawGraph(graph, body, chosen ?? shown);
    if (!chosen) {
      const first = body.steps.find((step) => ["failed", "unreadable", "running", "lost", "interrupted"].includes(step.state)) ?? body.steps.at(-1);
      if (first) showStep(first.id);
    }
  }

  function showStep(step) {
    if (shown === step) return;
    shown = step;
    stopStep();
    stopStep = stepPanel(panel, step);
    if (body) drawGraph(graph, body, step);
  }

  function update(_, next) {
    chosen = next;
    if (next) showStep(next);
    panel.refresh?.();
  }

  if (chosen) showStep(chosen);
  // A running step's time goes on while nothing else changes.
  const clock = setInterval(() => { if (body?.steps.some(({ state }) => state === "running")) show(); panel.tick?.(); }, 5000);
  return { update, destroy() { stop(); stopStep(); clearInterval(clock); } };
}

function drawGraph(parent, { id, steps }, chosen) {
  const columns = new Map();
  for (const step of steps) columns.set(step.level, [...(columns.get(step.level) ?? []), step]);
  const tallest = Math.max(...[...columns.values()].map((column) => column.length), 1);
  const place = new Map();
  for (const [level, column] of columns) {
    const top = ((tallest - column.length) * (NODE.height + NODE.gapY)) / 2;
    column.forEach((step, row) => place.set(step.name, [level * (NODE.width + NODE.gapX), top + row * (NODE.height + NODE.gapY)]));
  }
  const width = columns.size * (NODE.width + NODE.gapX) - NODE.gapX;
  const height = tallest * (NODE.height + NODE.gapY) - NODE.gapY;
  const edges = steps.flatMap((step) => step.edges.filter((need) => place.has(need)).map((need) => {
    const [fromX, fromY] = place.get(need), [toX, toY] = place.get(step.name);
    const x = fromX + NODE.width, y = fromY + NODE.height / 2, end = toY + NODE.height / 2, bend = NODE.gapX / 2;
    const lit = steps.find((other) => other.name === need).state === "done";
    return svg("path", { d: `M${x} ${y}C${x + bend} ${y} ${toX - bend} ${end} ${toX - 6} ${end}`, class: lit ? "edge lit" : "edge", "marker-end": "url(#arrow)" });
  }));
  const arrow = svg("defs", {}, svg("marker", { id: "arrow", viewBox: "0 0 8 8", refX: 2, refY: 4, markerWidth: 7, markerHeight: 7, orient: "auto" }, svg("path", { d: "M0 .8 6 4 0 7.2z", class: "tip" })));
  const focused = document.activeElement?.dataset?.step;
  const board = h("div", { class: "board", style: { width: `${width}px`, height: `${height}px` } },
    svg("svg", { width, height, "aria-hidden": "true" }, arrow, edges),
    steps.map((step) => {
      const [left, top] = place.get(step.name);
      const time = timeOf(step);
      return h("a", { class: `node ${step.state}`, href: `/workflows/${id}/steps/${step.id}`, "aria-current": step.id === chosen ? "true" : undefined, dataset: { step: step.id }, title: step.error ?? step.id,
        style: { left: `${left}px`, top: `${top}px`, width: `${NODE.width}px`, height: `${NODE.height}px` } },
      h("strong", {}, step.name), h("span", {}, status(step.state), h("small", {}, [time, step.attempt > 1 ? `#${step.attempt}` : ""].filter(Boolean).join(" · "))));
    }));
  fill(parent, board);
  if (focused) parent.querySelector(`[data-step="${CSS.escape(focused)}"]`)?.focus({ preventScroll: true });
  if (chosen && parent.chosen !== chosen) { // a wide graph shows the step whose attempts stand below it
    const left = place.get(steps.find((step) => step.id === chosen)?.name)?.[0];
    if (left !== undefined && (left < parent.scrollLeft || left + NODE.width > parent.scrollLeft + parent.clientWidth - 40)) parent.scrollLeft = left + NODE.width / 2 - parent.clientWidth / 2;
    parent.chosen = chosen;
  }
}

function stepPanel(parent, id) {
  const head = h("div");
  const attempts = h("div", { class: "chips", role: "group", "aria-label": "Attempts" });
  const log = h("pre", { class: "log", tabindex: "0", "aria-label": "Log" });
  const cut = h("p", { class: "quiet-note" });
  const side = h("div", { class: "panels" });
  const reports = h("div", { class: "reports" });
  const trials = h("div", { class: "reports" });
  const took = h("span");
  let body = null, reading = null, current = null, stopLog = () => {}, stopTrials = null;
  fill(parent, h("section", { class: "panel" }, head, attempts, cut, log), reports, trials, side);
  fill(head, h("p", { class: "quiet-note loading" }, "Reading the step…"));
  log.hidden = true;
  parent.tick = () => { if (current) setText(took, timeOf(current)); };
  const stop = poll(`/api/steps/${encodeURIComponent(id)}`, (found) => { body = found; show(); }, (error) => fill(parent, notice("error", "This step cannot be shown", error.message)));

  function show() {
    const number_ = Number(params().attempt) || body.attempts[0]?.attempt;
    const attempt = current = body.attempts.find((other) => other.attempt === number_);
    parent.tick();
    fill(head, h("h2", {}, id), unreadable(body.skipped), attempt?.error && !body.skipped.includes(attempt.error) ? notice("error", attempt.error) : null,
      attempt ? facts([["state", status(attempt.state)], ["time", timeOf(attempt) ? took : null], ["started", date(attempt.started)], ["host", attempt.host], ["code", attempt.provenance?.git?.slice?.(0, 12)],
        ["run", body.has_run ? h("a", { href: `/runs/${id}` }, "curves") : null]]) : h("p", { class: "quiet-note" }, "No attempt yet: this step waits for the steps it needs."));
    fill(attempts, body.attempts.length > 1 ? body.attempts.map((other) => h("button", { type: "button", class: "chip", "aria-pressed": String(other.attempt === number_), onclick: () => setParams({ attempt: other.attempt }) }, `attempt ${other.attempt}`, status(other.state))) : null);
    log.hidden = !attempt;
    if (attempt && reading !== number_) {
      reading = number_;
      stopLog();
      log.textContent = "";
      stopLog = poll(`/api/steps/${encodeURIComponent(id)}/attempts/${number_}/log`, showLog, (error) => { log.textContent = error.message; }, { every: 1500 });
    }
    const list = (name, values) => Object.keys(values).length ? h("section", { class: "panel" }, h("h2", {}, name), h("dl", { class: "settings" }, Object.entries(values).map(([key, value]) => [h("dt", {}, key), h("dd", {}, value)]))) : null;
    // A report is a table drawn in text: it keeps its lines, and the width they need.
    const [texts, values] = partition(body.result, (value) => typeof value === "string" && value.includes("\n"));
    fill(reports, Object.values(texts).map((text) => h("section", { class: "panel" }, h("h2", {}, "Report"), h("pre", { class: "log report", tabindex: "0", role: "region", "aria-label": "Report" }, text.replace(/^\n+|\s+$/g, "")))));
    // Of a step that printed one, its records are what the report's table is of.
    const [, rest] = partition(values, (value) => Object.keys(texts).length > 0 && value.startsWith("[{"));
    fill(side, list("Result", rest), list("Settings", body.config));
    if (body.sweep) stopTrials ??= poll(`/api/steps/${encodeURIComponent(id)}/trials`, (found) => fill(trials, trialsPanel(found, id)), (error) => fill(trials, notice("error", "The trials cannot be shown", error.message)), { every: 5000 });
  }

  function showLog({ text, cut: missing }) {
    const following = log.scrollHeight - log.scrollTop - log.clientHeight < 40;
    setText(log, text === null ? "This attempt has no log yet." : plain(text) || (current.state === "running" ? "The log is empty so far." : "The log is empty: this attempt printed nothing."));
    setText(cut, missing ? `The first ${number(missing)} bytes are not shown; the whole log is in storage.` : "");
    if (following) log.scrollTop = log.scrollHeight;
  }

  parent.refresh = () => body && show();
  return () => { stop(); stopLog(); stopTrials?.(); };
}

function trialsPanel({ trials, states, skipped, left_out: more }, sweep) {
  if (!trials.length) return [unreadable(skipped), h("p", { class: "quiet-note" }, "No trial has started yet.")];
  const rows = trials.map((trial) => [...cells(trial), why(trial)]);
  return h("section", { class: "panel trials" }, h("h2", {}, "Trials", h("span", { class: "links" }, h("a", { href: `/sweeps?metric=${encodeURIComponent(`sweep/${sweep}/PPL`)}` }, "Perplexity by configuration"))), unreadable(skipped), h("div", { class: "chips" }, Object.entries(states).map(([state, count]) => h("span", {}, status(state), ` ${number(count)}`))),
    table(["trial", "state", "steps", "why"], rows), more ? h("p", { class: "quiet-note" }, `${plural(more, "more trial")} ${more === 1 ? "is" : "are"} not shown.`) : null);
}

const partition = (object, test) => [true, false].map((wanted) => Object.fromEntries(Object.entries(object).filter(([, value]) => test(value) === wanted)));

// Terminal colours are dropped, and of a line that was redrawn only the last state is kept.
const plain = (text) => text.replace(/\x1b\[[0-9;?]*[A-Za-z]/g, "").split("\n").map((line) => line.replace(/\r+$/, "").split("\r").at(-1)).join("\n").trimEnd();
