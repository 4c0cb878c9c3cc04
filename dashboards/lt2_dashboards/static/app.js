// Routes and the frame around every page.

import { get } from "./api.js";
import { repaint } from "./chart.js";
import { fill, h, notice, setText } from "./dom.js";
import { runsPage } from "./pages/runs.js";
import { runPage } from "./pages/run.js";
import { comparePage } from "./pages/compare.js";
import { workflowPage, workflowsPage } from "./pages/workflows.js";
import { evaluationsPage } from "./pages/evaluations.js";
import { sweepsPage } from "./pages/sweeps.js";
import { figurePage, figuresPage } from "./pages/figures.js";
import { onChange } from "./url.js";

const NAV = [["/", "Runs"], ["/workflows", "Workflows"], ["/evaluations", "Evaluations"], ["/sweeps", "Sweeps"], ["/figures", "Figures"]];
const ROUTES = [
  [/^\/(?:runs)?$/, runsPage, "Runs"],
  [/^\/runs\/([^/]+)$/, runPage, "Run"],
  [/^\/compare$/, comparePage, "Compare"],
  [/^\/workflows$/, workflowsPage, "Workflows"],
  [/^\/workflows\/([^/]+)(?:\/steps\/([^/]+))?$/, workflowPage, "Workflow"],
  [/^\/evaluations$/, evaluationsPage, "Evaluations"],
  [/^\/sweeps$/, sweepsPage, "Sweeps"],
  [/^\/figures$/, figuresPage, "Figures"],
  [/^\/figures\/([^/]+)$/, figurePage, "Figure"],
];
const KEYS = [
  ["/", "filter runs"], ["j  k", "next and previous row"], ["x", "select the row"], ["Enter", "open the row"],
  ["c", "compare the selected runs"], ["g r", "runs"], ["g w", "workflows"], ["g e", "evaluations"], ["g s", "sweeps"], ["g f", "figures"], ["t", "light or dark"], ["?", "this list"],
];

const main = document.getElementById("main");
let current = null; // { page, match, destroy, update }

function route() {
  const path = location.pathname;
  const found = readable(path) && ROUTES.map(([pattern, page, name]) => [path.match(pattern), page, name]).find(([match]) => match);
  markNav(path);
  if (current && found && current.page === found[1] && current.update && current.where === found[0][1]) {
    current.update(...found[0].slice(1).map(decodePart));
    return;
  }
  current?.destroy?.();
  fill(main);
  current = null;
  if (!found) {
    document.title = "No such page · LT2";
    return fill(main, notice("empty", "There is no such page", "The address may be mistyped; the pages are listed above."));
  }
  document.title = `${found[2]} · LT2`;
  current = { page: found[1], where: found[0][1], ...found[1](main, ...found[0].slice(1).map(decodePart)) };
}

function readable(path) {
  try {
    return Boolean(decodeURIComponent(path));
  } catch { // a lone % or half a character
    return false;
  }
}

const decodePart = (part) => (part === undefined ? undefined : decodeURIComponent(part));

function markNav(path) {
  const first = path.split("/")[1];
  const at = { "": "/", runs: "/", compare: "/" }[first] ?? `/${first}`;
  fill(document.getElementById("nav"), NAV.map(([address, name]) =>
    h("a", { href: address, "aria-current": address === at ? "page" : undefined }, name)));
}

function switchTheme() {
  const next = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
  document.documentElement.dataset.theme = next;
  localStorage.setItem("theme", next);
  repaint();
}

// A menu closes when one goes on elsewhere, and by Escape.
document.addEventListener("click", (event) => {
  for (const menu of document.querySelectorAll("details.menu[open]")) if (!event.composedPath().includes(menu)) menu.open = false;
});
document.addEventListener("keydown", ({ key }) => {
  const menu = key === "Escape" && document.querySelector("details.menu[open]");
  if (menu) { menu.open = false; menu.querySelector("summary").focus(); }
});

// On paper every page is light.
let onScreen = null;
addEventListener("beforeprint", () => {
  onScreen = document.documentElement.dataset.theme;
  document.documentElement.dataset.theme = "light";
  repaint();
});
addEventListener("afterprint", () => {
  if (onScreen) document.documentElement.dataset.theme = onScreen;
  onScreen = null;
  repaint();
});

function showKeys() {
  const dialog = document.getElementById("keys");
  fill(dialog, h("h2", {}, "Keyboard"), h("dl", {}, KEYS.map(([key, does]) => [h("dt", {}, h("kbd", {}, key)), h("dd", {}, does)])),
    h("form", { method: "dialog" }, h("button", {}, "Close")));
  dialog.showModal();
}

let prefix = "";
document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.matches("input:not([type=checkbox]), textarea, select") || document.querySelector("dialog[open]")) return;
  const go = { "g r": "/", "g w": "/workflows", "g e": "/evaluations", "g s": "/sweeps", "g f": "/figures" }[`${prefix} ${event.key}`];
  prefix = event.key === "g" ? "g" : "";
  if (go) document.querySelector(`#nav a[href="${go}"]`).click();
  else if (event.key === "t") switchTheme();
  else if (event.key === "?") showKeys();
  else if (current?.key?.(event.key)) event.preventDefault();
});

document.getElementById("theme").addEventListener("click", switchTheme);
document.getElementById("help").addEventListener("click", showKeys);
onChange(route);
// On every page: who has two dashboards open tells them apart by it.
get("/api/root").then(({ body }) => setText(document.getElementById("root"), body.root), () => {}); // pages say what is wrong
// Text on a canvas is drawn once: with the wrong font if it is not here yet.
await Promise.all([document.fonts.load("12px Inter"), document.fonts.load("600 12px Inter")]);
route();
