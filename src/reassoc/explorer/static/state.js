// What is shown is what the address says: one map of parameters, written back at every change.
export const setup = JSON.parse(document.getElementById("setup").textContent);

const PAGE_ONLY = ["query", "prefix"];
const controls = new Map(Object.values(setup.panels).flatMap((panel) => panel.controls).map((control) => [control.name, control]));
const tables = new Set(Object.values(setup.panels).flatMap((panel) => panel.tables));
const values = new Map();
const listeners = [];
export const strange = [];

for (const [name, value] of new URLSearchParams(location.search)) {
  if (controls.has(name) || tables.has(name) || PAGE_ONLY.includes(name)) values.set(name, value);
  else strange.push(name);
}

export const value = (name) => values.get(name) ?? controls.get(name)?.default;

// Change parameters (null: back to the default), then tell everybody which.
export function set(changes) {
  const changed = Object.keys(changes).filter((name) => changes[name] !== (values.get(name) ?? null));
  for (const name of changed) {
    if (changes[name] === null || changes[name] === controls.get(name)?.default) values.delete(name);
    else values.set(name, changes[name]);
  }
  if (changed.length === 0) return;
  write();
  for (const listener of listeners) listener(changed);
}

function write() {
  const query = encode([...values]);
  try {
    history.replaceState(null, "", (query ? `?${query}` : location.pathname) + location.hash);
  } catch {
    setTimeout(write, 1000); // some browsers allow so many changes in so many seconds
  }
}

export const listen = (listener) => listeners.push(listener);

export const meant = (control) => control.when === null || control.when[1].includes(value(control.when[0]));

// What a panel's answer depends on: its controls that mean something now, and numbers of one's own.
export function settings(panel) {
  const { controls: own, tables: given } = setup.panels[panel];
  return [...own.filter(meant).map(({ name }) => [name, value(name)]), ...given.filter((name) => values.has(name)).map((name) => [name, values.get(name)])];
}

export const parameters = (panel) => new Set([...setup.panels[panel].controls.map(({ name }) => name), ...setup.panels[panel].tables]);

// Commas and semicolons may stand in a query, and a link with them can be read.
export const encode = (pairs) => pairs.map((pair) => pair.map((part) => encodeURIComponent(part).replace(/%2C/g, ",").replace(/%3B/g, ";")).join("=")).join("&");
