// All figures at a glance, and every figure on a page of its own with its parameters, its table and its exports.

import { get } from "../api.js";
import { figure } from "../chart.js";
import { fill, h, notice, said } from "../dom.js";
import { params, setParams } from "../url.js";

const NEWEST = 50; // runs offered for a figure's "runs"
const CALLED = { q: "filter", x: "over" }; // parameters whose names are short for the address
const words = (name) => (name[0].toUpperCase() + name.slice(1)).replaceAll("_", " ");

function grouped(figures, make) {
  const groups = new Map();
  for (const found of figures) groups.set(found.group, [...(groups.get(found.group) ?? []), found]);
  return [...groups].map(([group, members]) => make(group, members));
}

export function figuresPage(main) {
  const list = h("div", { class: "gallery" }, h("p", { class: "quiet-note loading" }, "Reading the figures…"));
  const charts = [];
  // A chart is drawn when it comes near the screen, so that a laptop does not draw a dozen to show four.
  const near = new IntersectionObserver((entries) => {
    for (const { isIntersecting, target } of entries) if (isIntersecting && !target.dataset.asked) { target.dataset.asked = "1"; target.figure.load({}); }
  }, { rootMargin: "200px" });
  const tile = (found) => {
    const free = found.parameters.every(({ required }) => !required);
    const head = [h("h3", {}, h("a", { href: `/figures/${found.name}` }, words(found.name))), h("p", {}, said(found.about))];
    if (!free) return h("li", {}, head, h("p", { class: "faint" }, "Needs ", found.parameters.filter(({ required }) => required).map(({ name }) => name).join(", "), "."));
    const chart = figure(found.name, { small: true });
    charts.push(chart);
    near.observe(chart.element);
    return h("li", {}, head, chart.element);
  };
  fill(main, h("header", { class: "page-head" }, h("h1", {}, "Figures")), list);
  let left = false;
  get("/api/figures").then(({ body }) => { if (!left) fill(list, grouped(body.figures, (group, members) => [h("h2", {}, group), h("ul", { class: "cards" }, members.map(tile))])); },
    (error) => fill(list, notice("error", "The figures cannot be listed", error.message)));
  return { destroy() { left = true; near.disconnect(); for (const chart of charts) chart.destroy(); } };
}

export function figurePage(main, name) {
  const form = h("form", { class: "toolbar parameters", onsubmit: (event) => event.preventDefault() });
  const about = h("p", { class: "about" });
  const others = h("nav", { class: "others", "aria-label": "Figures" });
  const chart = figure(name, { beside: true });
  let runs = [], known = [], left = false;
  const timer = setInterval(() => { if (!document.hidden) chart.reload(); }, 3000);
  fill(main, h("div", { class: "with-others" }, others, h("div", {},
    h("header", { class: "page-head" }, h("nav", { class: "crumbs", "aria-label": "Path" }, h("a", { href: "/figures" }, "Figures"), " / "), h("h1", {}, words(name))), about, form, chart.element)));
  document.title = `${words(name)} · LT2`;
  get("/api/figures").then(({ body }) => {
    if (left) return;
    const found = body.figures.find((other) => other.name === name);
    fill(about, said(found?.about ?? ""));
    fill(others, grouped(body.figures, (group, members) => [h("h2", {}, group), members.map((other) =>
      h("a", { href: `/figures/${other.name}`, "aria-current": other.name === name ? "page" : undefined }, words(other.name)))]));
    known = found?.parameters ?? [];
    drawForm();
    if (known.some((parameter) => parameter.name === "runs")) {
      get("/api/runs").then((answer) => { runs = answer.body.rows.slice(0, NEWEST); if (!left) drawForm(); }, () => {}); // without the list, names can still be typed
    }
  }, () => {}); // the chart itself says what is wrong

  function drawForm() {
    if (form.contains(document.activeElement)) return;
    fill(form, known.map((parameter) => h("label", { title: `${parameter.name}= in the address` }, CALLED[parameter.name] ?? parameter.name, control(parameter, runs))), runs.length ? picker(runs) : null);
  }

  const update = () => { chart.load(params()); drawForm(); };
  update();
  return { update, destroy() { left = true; clearInterval(timer); chart.destroy(); } };
}

function control({ name, kind, choices, default: usual }) {
  const now = params()[name];
  const change = (event) => setParams({ [name]: event.target.type === "checkbox" ? event.target.checked : event.target.value.trim() });
  if (kind === "switch") return h("input", { type: "checkbox", checked: now === "1", onchange: change });
  if (kind === "choice") return h("select", { onchange: change }, choices.map((choice) => h("option", { value: choice, selected: choice === (now ?? usual) }, choice)));
  return h("input", { value: now ?? "", placeholder: String(usual ?? "") || (name === "runs" || name === "q" ? "all" : "automatic"), name, spellcheck: "false", onchange: change });
}

// Ticks in a list are easier than names typed with commas; both say the same in the address.
function picker(runs) {
  const chosen = (params().runs ?? "").split(",").filter(Boolean);
  const toggle = (run) => {
    const now = (params().runs ?? "").split(",").filter(Boolean);
    setParams({ runs: (now.includes(run) ? now.filter((other) => other !== run) : [...now, run]).join(",") });
  };
  return h("details", { class: "menu" }, h("summary", {}, "Choose runs"), h("div", { class: "sheet left" },
    runs.map(({ run, note, workflow }) => h("label", {}, h("input", { type: "checkbox", checked: chosen.includes(run), onchange: () => toggle(run) }), `${run} `, h("small", { class: "faint" }, note || workflow)))));
}
