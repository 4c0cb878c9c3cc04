// Controls of curves that several pages share; what they say is in the URL.

import { h } from "./dom.js";
import { params, setParams } from "./url.js";

const AXES = [["tokens", "by tokens"], ["flops", "by FLOPs"], ["time", "by hours"]];
export const curveParams = (given = params()) => ({ x: AXES.some(([axis]) => axis === given.x) ? given.x : undefined, log: given.log === "1", smooth: Number(given.smooth) || undefined, seeds: given.seeds === "1", points: TILE_POINTS });
const TILE_POINTS = 500; // a tile is some 400 pixels wide

// By run the number of its colour, where a chart draws several seeds as one line.
export const coloursOf = ({ option }) => new Map(option.series.flatMap(({ members = [], colorIndex }) => members.map((run) => [run, colorIndex])));

// `several`: of pages that draw more than one run.
export function curveControls({ several = true } = {}) {
  const pick = (name, label, choices) => {
    const select = h("select", { "aria-label": label, onchange: (event) => setParams({ [name]: event.target.value }) },
      choices.map(([value, text]) => h("option", { value }, text)));
    select.sync = () => { select.value = params()[name] ?? ""; };
    return select;
  };
  const x = pick("x", "Horizontal axis", [["", "by step"], ...AXES]);
  const smooth = pick("smooth", "Smoothing", [["", "no smoothing"], ["5", "smooth 5"], ["20", "smooth 20"], ["80", "smooth 80"]]);
  const log = h("input", { type: "checkbox", onchange: (event) => setParams({ log: event.target.checked }) });
  const seeds = h("input", { type: "checkbox", onchange: (event) => setParams({ seeds: event.target.checked }) });
  const element = h("div", { class: "controls" }, x, smooth, h("label", {}, log, "log"),
    several ? h("label", { title: "Runs that differ in their seeds only are one line: their mean, with one standard deviation" }, seeds, "mean of seeds") : null);
  return {
    element,
    sync() { x.sync(); smooth.sync(); log.checked = params().log === "1"; seeds.checked = params().seeds === "1"; },
  };
}
