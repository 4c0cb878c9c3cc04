// Reading from the server: one ETag per address, and polling that rests while the page is hidden.

const seen = new Map(); // address -> { etag, body }

// `away`: the server or its store cannot be reached just now, which says nothing about what was asked.
export class ServerError extends Error {
  constructor(message, { away = false, store = false } = {}) {
    super(message);
    this.away = away;
    this.store = store; // it is the store
  }
}

export async function get(address, signal) {
  const known = seen.get(address);
  let response;
  try {
    response = await fetch(address, { signal, cache: "no-store", headers: known ? { "If-None-Match": known.etag } : {} });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServerError("The server does not answer. Is `lt2 dashboard` still running?", { away: true });
  }
  if (response.status === 304) return { body: known.body, changed: false };
  if (response.status === 401) throw new ServerError("This session has ended. Open the address that `lt2 dashboard` printed.");
  if (!response.ok) {
    const refusal = await response.json().catch(() => ({}));
    throw new ServerError(refusal.error ?? `The server answered ${response.status}.`, { away: response.status === 503, store: response.status === 503 });
  }
  let body;
  try {
    body = await response.json();
  } catch (error) { // the page was left, or the server stopped, while the answer was read: nothing of it is kept
    throw error.name === "AbortError" ? error : new ServerError("The server's answer was cut off.");
  }
  const etag = response.headers.get("ETag");
  if (etag) {
    if (seen.size > 200) seen.delete(seen.keys().next().value);
    seen.set(address, { etag, body });
  }
  return { body, changed: true };
}

// Calls show(body) at once and whenever the answer changes; fail(error) on trouble, after which it goes on trying.
export function poll(address, show, fail, { every = 2000 } = {}) {
  const controller = new AbortController();
  let timer, first = true, failed = false;
  const again = () => { timer = setTimeout(ask, document.hidden ? 30000 : failed ? 5000 : every); };
  const wake = () => { if (!document.hidden) { clearTimeout(timer); ask(); } };
  let busy = false;
  async function ask() {
    if (busy) return;
    busy = true;
    try {
      const { body, changed } = await get(address, controller.signal);
      if (changed || first || failed) show(body);
      if (failed || first) connection(null);
      first = failed = false;
    } catch (error) {
      if (error.name === "AbortError") return;
      failed = true;
      if (!(error instanceof ServerError)) console.error(error);
      connection(first ? null : error);
      if (first) fail(error);
    } finally {
      busy = false;
    }
    again();
  }
  document.addEventListener("visibilitychange", wake);
  ask();
  return () => { controller.abort(); clearTimeout(timer); document.removeEventListener("visibilitychange", wake); };
}

export function query(parameters) {
  const pairs = Object.entries(parameters).filter(([, value]) => value !== undefined && value !== null && value !== "" && value !== false);
  const text = new URLSearchParams(pairs.map(([key, value]) => [key, value === true ? "1" : String(value)])).toString();
  return text ? `?${text}` : "";
}

// What the head of the page says of the connection: nothing, or what is away.
export function connection(error) {
  const said = document.getElementById("connection");
  said.textContent = error ? `${error.store ? "the store is unreachable, " : ""}reconnecting…` : "";
  said.title = error ? error.message : "";
}
