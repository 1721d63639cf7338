// Elements without markup in strings: whatever text comes in stays text.
const SVG = "http://www.w3.org/2000/svg";

export const el = (name, attributes, ...children) => fill(document.createElement(name), attributes, children);

export const svg = (name, attributes, ...children) => fill(document.createElementNS(SVG, name), attributes, children);

function fill(node, attributes, children) {
  for (const [key, value] of Object.entries(attributes ?? {})) {
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (value === true) node.setAttribute(key, "");
    else if (value !== false && value !== null && value !== undefined) node.setAttribute(key, value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

// A box that scrolls must be reachable by keyboard, and say what it is.
export const scroll = (label, ...children) => el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": label }, ...children);

// `groups` ([title, columns]) stand above the heads, after the first.
export function table(heads, rows, groups = null) {
  return el("table", { class: groups ? "grouped" : null },
    el("thead", null,
      groups ? el("tr", null, el("td"), ...groups.map(([title, columns]) => el("th", { scope: "colgroup", colspan: columns }, title))) : null,
      el("tr", null, ...heads.map((head) => (head ? el("th", { scope: "col" }, head) : el("td"))))),
    el("tbody", null, ...rows));
}
