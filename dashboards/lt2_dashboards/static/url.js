// The address bar is the only state: pages read it, controls write it, and a copied link shows the same thing.

export const params = () => Object.fromEntries(new URLSearchParams(location.search));

const listeners = new Set();
export const onChange = (listener) => { listeners.add(listener); };

export function setParams(patch, { replace = true } = {}) {
  const next = new URLSearchParams(location.search);
  for (const [key, value] of Object.entries(patch)) {
    if (value === undefined || value === null || value === "" || value === false) next.delete(key);
    else next.set(key, value === true ? "1" : String(value));
  }
  const text = next.toString().replaceAll("%2C", ",").replaceAll("%3A", ":");
  go(location.pathname + (text ? `?${text}` : ""), { replace });
}

export function go(address, { replace = false } = {}) {
  if (address === location.pathname + location.search) return;
  history[replace ? "replaceState" : "pushState"](null, "", address);
  for (const listener of listeners) listener();
}

addEventListener("popstate", () => { for (const listener of listeners) listener(); });

// Plain links stay plain links: they open in a new tab, can be copied, and work from the keyboard.
document.addEventListener("click", (event) => {
  const link = event.target.closest("a[href]");
  if (!link || event.defaultPrevented || event.button || event.metaKey || event.ctrlKey || event.shiftKey) return;
  const target = new URL(link.href);
  if (target.origin !== location.origin || link.hasAttribute("download") || target.pathname.startsWith("/api/")) return;
  if (target.hash && target.pathname === location.pathname) return;
  event.preventDefault();
  go(target.pathname + target.search);
  scrollTo(0, 0);
});
