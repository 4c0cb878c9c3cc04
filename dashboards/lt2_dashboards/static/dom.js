// Elements without markup strings: everything shown is set as text, so no name can become HTML.

export function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "style") for (const [key, item] of Object.entries(value)) element.style.setProperty(key, item);
    else if (name === "dataset") Object.assign(element.dataset, value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

export function svg(tag, attributes = {}, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) if (value !== undefined) element.setAttribute(name, value);
  element.append(...children.flat(Infinity));
  return element;
}

export function fill(parent, ...children) {
  parent.replaceChildren(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return parent;
}

// A name of several parts may be broken between them, not within.
export const parts = (name) => name.split(/(?<=[._/])/).flatMap((part, index) => (index ? [h("wbr"), part] : part));

// Text of the server: what stands in backticks is typed.
export const said = (text) => text.split("`").map((part, index) => (index % 2 ? h("code", {}, part) : part));

// Sets text only when it differs: a page that polls must not disturb a selection or a screen reader.
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

export const notice = (kind, title, ...details) =>
  h("div", { class: `notice ${kind}`, role: kind === "error" ? "alert" : "status" }, h("strong", {}, title), details.map((d) => h("p", {}, d)));

export const facts = (pairs) =>
  h("dl", { class: "facts" }, pairs.filter(([, value]) => value !== null && value !== undefined && value !== "").map(([name, value]) =>
    h("div", {}, h("dt", {}, name), h("dd", {}, value))));

export const status = (state) => h("span", { class: `status ${state}` }, LABELS[state] ?? state);
const LABELS = { running: "live" };
