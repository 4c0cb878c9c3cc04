// Every figure on a page of its own, with its parameters, its table and its exports.

import { get } from "../api.js";
import { figure } from "../chart.js";
import { fill, h, notice } from "../dom.js";
import { params, setParams } from "../url.js";

export function figuresPage(main) {
  const list = h("ul", { class: "cards" });
  fill(main, h("header", { class: "page-head" }, h("h1", {}, "Figures")), list);
  get("/api/figures").then(({ body }) => fill(list, body.figures.map(({ name, about, parameters }) =>
    h("li", {}, h("a", { href: `/figures/${name}` }, name), h("p", {}, about), h("small", {}, parameters.map((parameter) => parameter.name).join(", "))))), (error) => fill(list, notice("error", "The figures cannot be listed", error.message)));
  return {};
}

export function figurePage(main, name) {
  const form = h("form", { class: "toolbar parameters", onsubmit: (event) => event.preventDefault() });
  const about = h("p", { class: "quiet-note" });
  const chart = figure(name);
  const timer = setInterval(() => { if (!document.hidden) chart.reload(); }, 3000);
  chart.element.classList.add("large");
  fill(main, h("header", { class: "page-head" }, h("nav", { class: "crumbs", "aria-label": "Path" }, h("a", { href: "/figures" }, "Figures"), " / "), h("h1", {}, name)), about, form, chart.element);
  get("/api/figures").then(({ body }) => {
    const found = body.figures.find((other) => other.name === name);
    about.textContent = found?.about ?? "";
    fill(form, (found?.parameters ?? []).map((parameter) => h("label", {}, parameter.name, control(parameter))));
  }, () => {});
  const update = () => chart.load(params());
  update();
  return { update, destroy() { clearInterval(timer); chart.destroy(); } };
}

function control({ name, kind, choices, default: usual }) {
  const now = params()[name];
  const change = (event) => setParams({ [name]: event.target.type === "checkbox" ? event.target.checked : event.target.value.trim() });
  if (kind === "switch") return h("input", { type: "checkbox", checked: now === "1", onchange: change });
  if (kind === "choice") return h("select", { onchange: change }, choices.map((choice) => h("option", { value: choice, selected: choice === (now ?? usual) }, choice)));
  return h("input", { value: now ?? "", placeholder: String(usual ?? ""), name, spellcheck: "false", onchange: change });
}
