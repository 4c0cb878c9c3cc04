// Colours and defaults of every chart. Also copied into exported files, so it must not import anything.

// Lines differ in lightness too, so that the first eight, and the paper's grey, are told apart with any colour vision.
export const LIGHT = {
  text: "#3b4250", faint: "#666f81", line: "#e6e9ee", axis: "#c9ced8", panel: "#ffffff", border: "#dde1e8", paper: "#8a93a5",
  heat: ["#f1f4f9", "#dbe6f8", "#b7cef1", "#8db2e8", "#6094dc", "#3573c8", "#1f4f96"], heatFlip: 4,
  palette: ["#2f6bd8", "#d9622b", "#1a9470", "#6b2478", "#6b5300", "#8c1d2c", "#c25fc0", "#2b1f80", "#73164d", "#70618a"],
};
export const DARK = {
  text: "#c6ccd8", faint: "#8791a3", line: "#252b36", axis: "#3a4250", panel: "#171b22", border: "#2c333f", paper: "#79839a",
  heat: ["#1c222c", "#1d2f4a", "#23406b", "#2b548d", "#386bb0", "#5289d0", "#7aaaf0"], heatFlip: 5,
  palette: ["#6ea3ff", "#f0915f", "#4cc79e", "#e3b7f2", "#c59a1c", "#e44862", "#b95cc4", "#bdeaa5", "#857819", "#e2eb66"],
};

export const colour = (theme, index) => theme.palette[index % theme.palette.length];

// Lines that come after all colours are used begin with the first again, in another dash.
export const dash = (theme, index) => ["solid", "dashed", "dotted"][Math.floor(index / theme.palette.length) % 3];
const SHAPES = ["rect", "triangle", "diamond"]; // marks by which a legend tells series of one colour apart
const BAR = "path://M0 0h12v4h-12z";
const DASHED = { dashed: "path://M0 0h5v4h-5zM7 0h5v4h-5z", dotted: "path://M0 0h2v4h-2zM5 0h2v4h-2zM10 0h2v4h-2z" };

export function compact(value, digits = 4) {
  if (typeof value !== "number" || !Number.isFinite(value)) return value === null || value === undefined ? "" : String(value);
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size >= 1e15 || size < 1e-3) return value.toExponential(2).replace(/\.?0+e/, "e").replace("e+", "e");
  for (const [unit, name] of [[1e12, "T"], [1e9, "B"], [1e6, "M"], [1e4, "k"]]) {
    if (size >= unit) return trim(value / (name === "k" ? 1e3 : unit), digits) + name;
  }
  return trim(value, digits);
}

const trim = (value, digits = 4) => String(Number(value.toPrecision(digits)));

// Lengths in tokens stand on axes by their base-2 logarithm: 14 is 16384, which is called 16k.
export function binary(exponent) {
  const value = 2 ** exponent;
  for (const [unit, name] of [[2 ** 20, "M"], [2 ** 10, "k"]]) if (value >= unit) return trim(value / unit) + name;
  return trim(value);
}

// Bytes have units of their own: 2 billion of them are 2 GB, and "2B" would be two.
export function bytes(value) {
  for (const [unit, name] of [[1e15, "PB"], [1e12, "TB"], [1e9, "GB"], [1e6, "MB"], [1e3, "kB"]]) if (Math.abs(value) >= unit) return `${trim(value / unit)} ${name}`;
  return typeof value === "number" ? `${trim(value)} B` : compact(value);
}

// On an axis 0.0003 stands below 0.0012, not 3e-4, and 1.0065 between 1.006 and 1.007, which four digits would say twice.
const tick = (value) => (Math.abs(value) < 1e-3 && Math.abs(value) >= 1e-5 ? trim(value) : compact(value, 7));

const scientific = (value) => value.toExponential().replace("e+", "e");

// What a logarithmic axis may be marked at, between powers of ten: the first of these that gives few enough marks.
const MARKS = [[1, 1.5, 2, 3, 4, 5, 6, 8], [1, 2, 5], [1, 3], [1]];

// Such an axis ends at the marks next to its values. By itself it would end at powers of ten: of a loss from 2 to 6 half of it would
// be empty, and nothing could be read between 1 and 10.
function marked(axis, series, vertical, index, most) {
  if (axis.type !== "log" || axis.min !== undefined || axis.max !== undefined) return axis;
  let low = Infinity, high = 0;
  for (const { data, ...each } of series.filter((each) => ((vertical ? each.yAxisIndex : each.xAxisIndex) ?? 0) === index)) {
    for (const item of data ?? []) {
      const value = item?.value ?? item, at = Array.isArray(value) ? value[vertical ? 1 : 0] : vertical ? value : null;
      if (at > 0) { low = Math.min(low, at); high = Math.max(high, at); }
    }
  }
  if (!high) return axis;
  if (high >= 1e15 && !axis.bytes) axis = { ...axis, axisLabel: { formatter: scientific, ...axis.axisLabel } }; // not 100T below 1e15
  for (const steps of MARKS) {
    const marks = [];
    for (let power = Math.floor(Math.log10(low)) - 1; power <= Math.log10(high) + 1; power += 1) marks.push(...steps.map((step) => Number(`${step}e${power}`)));
    const customValues = marks.slice(marks.findLastIndex((mark) => mark < low), marks.findIndex((mark) => mark > high) + 1);
    // Functions: series that are hidden by the legend no longer count.
    const min = (shown) => customValues.findLast((mark) => mark < shown.min) ?? customValues[0];
    const max = (shown) => customValues.find((mark) => mark > shown.max) ?? customValues.at(-1);
    if (customValues.length <= most) return { ...axis, min, max, axisLabel: { ...axis.axisLabel, customValues }, axisTick: { show: false, customValues } };
  }
  return axis;
}

// Panels stand beside each other where the chart, `width` pixels wide, has room for that.
const columnsOf = ({ columns }, width) => (width < 520 ? 1 : columns);
export const rowsOf = ({ panels }, width = 720) => (panels ? Math.ceil(panels.titles.length / columnsOf(panels, width)) : 1);

// Where the panels of an option go, in percent; a small chart shows the first only.
function placed(option, theme, small, pixels) {
  const { panels, ...rest } = option;
  if (small) {
    const first = (list) => list.filter((item) => (item.gridIndex ?? item.xAxisIndex) === 0);
    return { ...rest, xAxis: first(rest.xAxis), yAxis: first(rest.yAxis), series: first(rest.series) };
  }
  const columns = columnsOf(panels, pixels), rows = rowsOf(option, pixels);
  const edge = 1 + 1200 / pixels; // half of an axis's last label is beside it
  const percent = 100 / Math.max(560, 200 * rows); // of a pixel: charts are at least about so high
  const top = 40 * percent, height = (100 - top) / rows, width = 100 / columns;
  const at = panels.titles.map((text, index) => ({ text, row: Math.floor(index / columns), column: index % columns }));
  return {
    ...rest,
    grid: at.map(({ row, column }) => ({ left: `${column * width + 1}%`, width: `${width - edge}%`, top: `${top + row * height + 26 * percent}%`,
      height: `${height - (row === rows - 1 ? 62 : 44) * percent}%`, containLabel: true })),
    title: at.map(({ text, row, column }) => ({ text, left: `${column * width + 1}%`, top: `${top + row * height}%`, padding: 0,
      textStyle: { color: theme.text, fontSize: 12, fontWeight: 600, fontFamily: "Inter, system-ui, sans-serif" } })),
    xAxis: rest.xAxis.map((axis, index) => (at[index].row === rows - 1 ? axis : { ...axis, name: undefined })),
  };
}

// A figure's option with this theme: what Python leaves out (colours, fonts, grids) is filled in here.
// `width` and `height` are the chart's, in pixels: long labels take no more than two fifths of its width, and what a
// tooltip lists no more than its height.
export function themed(option, theme, { small = false, legend = !small, width = 720, height = 400 } = {}) {
  const { empty: _, ...given } = structuredClone(option);
  const rest = given.panels ? placed(given, theme, small, width) : given;
  const size = small ? 11 : 12, flat = given.panels && rowsOf(given, width) > 2;
  const axis = ({ binary: lengths, bytes: inBytes, ...given }, vertical) => ({
    nameLocation: "middle",
    nameGap: vertical ? 44 : 26,
    nameTextStyle: { color: theme.faint, fontSize: size },
    axisLine: { show: !vertical, lineStyle: { color: theme.axis } },
    axisTick: { show: false },
    splitNumber: small || flat ? 4 : 6,
    splitLine: { show: vertical || given.type === "value", lineStyle: { color: theme.line } },
    ...given,
    ...(given.splitLine ? { splitLine: { lineStyle: { color: theme.line }, ...given.splitLine } } : {}),
    ...(small && !(vertical && legend) ? { name: undefined } : {}),
    axisLabel: {
      color: theme.faint, fontSize: size, hideOverlap: true,
      ...(given.type === "category" ? {} : { formatter: lengths ? binary : inBytes ? bytes : tick, ...(given.max === "dataMax" && !vertical ? { showMaxLabel: false } : {}) }),
      ...given.axisLabel,
      ...(given.axisLabel?.width > 0.4 * width ? { width: 0.4 * width, ...(small ? {} : { overflow: "break", lineHeight: 13 }) } : {}), // what tells labels apart may stand at their end
    },
  });
  const each = (value, vertical) => (value === undefined ? undefined : [].concat(value).map((given, index) => axis(marked(given, rest.series ?? [], vertical, index, small ? 5 : 8), vertical)));
  const lengths = [].concat(rest.xAxis ?? []).some((given) => given.binary);
  const result = {
    animation: false,
    backgroundColor: theme.panel, // open symbols are filled with it
    textStyle: { fontFamily: "Inter, system-ui, sans-serif", color: theme.text },
    // "all": the names of the axes lie inside too, however wide their labels are. Small charts have none, but beside a legend, where two
    // axes may be of two scales.
    grid: { left: small ? 6 : 8, right: small ? 12 : 16, top: small ? 10 : 24, bottom: 4, outerBoundsMode: "same", outerBoundsContain: small && !legend ? "axisLabel" : "all" },
    ...rest,
    xAxis: each(rest.xAxis, false),
    yAxis: each(rest.yAxis, true),
    tooltip: {
      backgroundColor: theme.panel, borderColor: theme.border, borderWidth: 1, padding: [8, 10], confine: true,
      textStyle: { color: theme.text, fontSize: 12 }, extraCssText: "box-shadow: 0 4px 16px rgba(0,0,0,.18)",
      axisPointer: { type: "line", lineStyle: { color: theme.faint, type: "dashed" } },
      formatter: (items) => tooltip([].concat(items), theme, lengths, Math.max(4, Math.min(14, Math.floor(height / 18) - 3)), Math.min(260, width - 140)),
      ...rest.tooltip,
    },
    series: (rest.series ?? []).map((series) => styled(series, theme, small)),
  };
  const names = [...new Set(result.series.map((series) => series.name).filter(Boolean))];
  const icons = new Map(); // in the legend, of names that look the same wherever they are drawn
  const shapes = result.series.some(({ type, symbol, itemStyle }) => type === "scatter" && (SHAPES.includes(symbol) || itemStyle?.borderWidth));
  for (const { name, lineStyle, type, symbol, silent } of [...result.series].sort((a, b) => Boolean(a.silent) - Boolean(b.silent))) {
    if (lineStyle?.width === 0 || (silent && icons.has(name))) continue; // a band, or an error bar of what has a mark
    const icon = type !== "scatter" ? DASHED[lineStyle?.type] ?? (shapes ? BAR : undefined) : shapes ? symbol ?? "circle" : undefined;
    icons.set(name, icons.has(name) && icons.get(name) !== icon ? undefined : icon);
  }
  if (legend && (rest.legend || names.length > 1)) {
    result.legend = {
      type: "scroll", top: 0, left: 0, icon: "roundRect", itemWidth: 12, itemHeight: shapes ? 10 : 4, ...rest.legend,
      data: names.map((name) => (icons.get(name) ? { name, icon: icons.get(name) } : { name })),
      formatter: (name) => (name.length > 48 ? `${name.slice(0, 47)}…` : name),
      textStyle: { color: theme.text, fontSize: 12, lineHeight: 16 }, pageTextStyle: { color: theme.faint },
      pageIconColor: theme.text, pageIconInactiveColor: theme.axis, inactiveColor: theme.axis,
    };
    if (!Array.isArray(result.grid)) result.grid = { ...result.grid, top: 40 };
  } else delete result.legend;
  if (rest.parallel) {
    // As many as can be read beside each other: the first settings, and the result.
    const most = Math.max(3, Math.floor(width / 80) - 1), fit = rest.parallelAxis.filter((_, index, { length }) => index < most - 1 || index === length - 1);
    result.parallelAxis = fit.map((given) => ({
      nameTextStyle: { color: theme.text, fontSize: 12, lineHeight: 14 }, axisLine: { lineStyle: { color: theme.axis } },
      axisTick: { lineStyle: { color: theme.axis } }, ...given,
      z: 20, axisLabel: { show: !small, color: theme.text, fontSize: 11, backgroundColor: theme.panel, padding: [1, 3], borderRadius: 2, ...(given.type === "category" ? {} : { formatter: tick }) },
    }));
  }
  if (rest.visualMap) {
    const { heat, ...map } = rest.visualMap;
    result.visualMap = { textStyle: { color: theme.faint }, ...(map.type === "piecewise" ? {} : { formatter: compact }), ...map };
    if (heat) Object.assign(result.visualMap, { inRange: { color: theme.heat }, itemGap: 14, itemWidth: 12, itemHeight: 12, show: !small,
      pieces: map.pieces?.map((piece, index) => ({ ...piece, color: theme.heat[index % theme.heat.length] })) });
    if (heat && result.grid && !small) result.grid = { ...result.grid, top: 40 };
  }
  for (const key of ["xAxis", "yAxis"]) if (result[key] === undefined) delete result[key];
  if (rest.parallel || rest.xAxis === undefined) delete result.grid;
  return result;
}

function styled(series, theme, small) {
  const { colorIndex, band, paper, ...rest } = series;
  const tint = paper ? theme.paper : colorIndex === undefined ? undefined : colour(theme, colorIndex);
  const own = tint ? { color: tint } : {};
  Object.assign(rest, hollow(rest, tint, theme));
  if (Array.isArray(rest.data)) rest.data = rest.data.map((item) => (item?.symbol ? { ...item, ...hollow(item, tint, theme) } : item));
  if (rest.markLine) rest.markLine = { silent: true, symbol: "none", animation: false, label: { show: false }, lineStyle: { color: theme.axis, type: "dashed", width: 1 }, ...rest.markLine };
  if (rest.type === "heatmap") {
    const label = { ...rest.label, color: theme.text, fontSize: small ? 10 : 13, fontWeight: 600, formatter: ({ value }) => compact(value[2]) };
    const data = rest.data.map((cell) => (cell.value[2] >= theme.heatFlip ? { ...cell, label: { color: theme.panel } } : cell));
    return { ...rest, data, label, itemStyle: { borderColor: theme.panel, borderWidth: 2, borderRadius: 3 }, emphasis: { disabled: true } };
  }
  if (rest.type === "line") {
    const after = band || paper || colorIndex === undefined ? {} : { type: dash(theme, colorIndex) };
    const line = { width: band ? 0 : small ? 1.4 : 1.7, ...(tint ? { color: tint } : {}), ...after, ...rest.lineStyle };
    const area = rest.areaStyle ? { areaStyle: { ...(tint ? { color: tint } : {}), ...rest.areaStyle } } : {};
    return {
      showSymbol: rest.data?.length < 2, symbol: "circle", symbolSize: 5, sampling: undefined, ...rest, ...own, ...area, lineStyle: line,
      ...(band ? { silent: true, symbol: "none", tooltip: { show: false }, z: 1 } : { z: 3 }),
      emphasis: { disabled: true },
    };
  }
  const label = rest.label ? { label: { color: theme.text, ...rest.label } } : {};
  return { ...rest, ...own, ...label };
}

// Open symbols: what ECharts calls empty is filled with white, whatever the background.
function hollow({ symbol, itemStyle }, tint, theme) {
  if (!symbol?.startsWith?.("empty")) return {};
  return { symbol: symbol.slice(5).toLowerCase(), itemStyle: { ...itemStyle, color: theme.panel, borderColor: tint, borderWidth: 2 } };
}

// Built from nodes, never from markup: names of runs are text from other people. Of more than `most` values those in the
// middle are left out: whichever way is better, the best ones are there.
function tooltip(items, theme, lengths, most, room) {
  const box = document.createElement("div");
  const shown = items.filter((item) => item.value !== undefined && !isBand(item));
  if (!shown.length) return box;
  const head = document.createElement("div");
  head.style.cssText = `color:${theme.faint};margin-bottom:4px`;
  const first = shown[0];
  head.textContent = first.data?.name ?? first.axisValueLabel ?? "";
  if (first.axisValue !== undefined && typeof first.axisValue === "number") {
    head.textContent = lengths ? `${binary(first.axisValue)} tokens` : `${first.axisDim === "x" ? "at " : ""}${first.axisValue.toLocaleString("en", { maximumFractionDigits: 4 })}`;
  }
  if (head.textContent) box.append(head);
  const value = (item) => item.data?.shown ?? (!Array.isArray(item.value) ? item.value : ["parallel", "heatmap"].includes(item.seriesType) ? item.value.at(-1) : item.value[1]);
  const sorted = shown.length > Math.min(most, 6) ? [...shown].sort((a, b) => value(b) - value(a)) : shown;
  const gap = sorted.length > most ? most >> 1 : -1, left = sorted.length - most;
  if (gap > 0) sorted.splice(gap, left);
  for (const [at, item] of sorted.entries()) {
    if (at === gap) {
      const more = document.createElement("div");
      more.style.cssText = `color:${theme.faint}`;
      more.textContent = `… ${left} more`;
      box.append(more);
    }
    const row = document.createElement("div");
    row.style.cssText = "display:flex;gap:8px;align-items:center;line-height:1.5";
    const dot = document.createElement("span");
    dot.style.cssText = `width:8px;height:8px;border-radius:2px;background:${item.color}`;
    const name = document.createElement("span");
    name.style.cssText = `flex:1;max-width:${room}px;overflow:hidden;text-overflow:ellipsis;white-space:nowrap`;
    name.textContent = item.seriesName;
    const number = document.createElement("b");
    number.style.cssText = "font-variant-numeric:tabular-nums;font-weight:600";
    number.textContent = compact(value(item));
    row.append(dot, name, number);
    box.append(row);
    if (item.data?.detail) {
      const detail = document.createElement("div");
      detail.style.cssText = `color:${theme.faint}`;
      detail.textContent = item.data.detail;
      box.append(detail);
    }
  }
  return box;
}

const isBand = (item) => item.data?.band === true || item.seriesId?.startsWith("band ");
