import { compact } from "./theme.js";

export { compact };

export function number(value, digits = 4) {
  if (value === null || value === undefined) return "–";
  if (typeof value !== "number") return String(value);
  const size = Math.abs(value);
  if (Number.isInteger(value) && size < 1e7) return value.toLocaleString("en");
  if (size >= 1e5 || size < 1e-3) return compact(value);
  return Number(value.toPrecision(digits + (size >= 1000 ? 1 : 0))).toLocaleString("en", { maximumFractionDigits: 20 });
}

// A result in the head of a column: "validation loss".
export function metricName(key) {
  if (key === "tokens_per_s") return "tokens/s";
  const parts = key.split("/");
  return (parts.at(-2) === "perplexity" ? [parts[0], parts.at(-1)] : parts.slice(-2)).join(" ");
}

// A setting in a narrow column: 0.0025986667263121865 is 0.00259867; the whole text belongs into the title.
export const brief = (text) => (/^-?\d*\.\d{7,}$/.test(text) ? String(Number(Number(text).toPrecision(6))) : text);

export function ago(seconds, now = Date.now() / 1000) {
  const age = Math.max(0, now - seconds), ahead = seconds - now; // of a machine whose clock is fast
  for (const [unit, name] of [[86400 * 365, "y"], [86400, "d"], [3600, "h"], [60, "min"]]) {
    if (age >= unit) return `${Math.floor(age / unit)} ${name} ago`;
    if (ahead >= unit) return `in ${Math.floor(ahead / unit)} ${name}`;
  }
  return age < 5 ? "now" : `${Math.floor(age)} s ago`;
}

export function duration(seconds) {
  if (!Number.isFinite(seconds)) return "–";
  const whole = Math.round(seconds); // first, or 119.7 is "1 min 60 s"
  if (whole < 60) return `${whole} s`;
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${whole % 60} s`;
  return `${Math.floor(whole / 3600)} h ${Math.floor((whole % 3600) / 60)} min`;
}

export const date = (seconds) =>
  seconds ? new Date(seconds * 1000).toLocaleString("en-GB", { dateStyle: "medium", timeStyle: "short" }) : "–";

// The shortest endings that still tell the keys apart: train.lr -> lr, model.layout.type -> layout.type.
export function shortNames(keys) {
  const names = new Map();
  for (const key of keys) {
    const parts = key.split(".");
    let count = 1;
    const ending = () => parts.slice(-count).join(".");
    while (count < parts.length && keys.some((other) => other !== key && (other === ending() || other.endsWith(`.${ending()}`)))) count += 1;
    if (count < parts.length && ["type", "name", "path"].includes(ending())) count += 1;
    names.set(key, ending());
  }
  return names;
}
