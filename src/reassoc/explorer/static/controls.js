// The inputs of a panel, from the list that the server checks against.
import { el } from "explorer/dom";
import { minus } from "explorer/number";
import { frozen } from "explorer/source";
import { listen, meant, set, setup, value } from "explorer/state";

// `more` may turn one change into several.
export function build(panel, place, more = (changes) => changes) {
  const change = (name, chosen) => set(more({ [name]: chosen }));
  const parts = setup.panels[panel].controls.map((control) => (control.words.length ? menu : slider)(control, change));
  place.append(...parts.map(({ node }) => node));
  const refresh = () => parts.forEach(({ update }) => update());
  listen(refresh);
  refresh();
}

function menu(control, change) {
  const select = el("select", { id: `c-${control.name}`, onchange: () => change(control.name, select.value) },
    ...control.values.map((each, i) => el("option", { value: each }, control.words[i])));
  return part(control, select, () => { select.value = value(control.name); });
}

function slider(control, change) {
  const places = frozen ? control.grid : control.values;
  const input = el("input", { id: `c-${control.name}`, type: "range", min: 0, max: places.length - 1, step: 1,
    oninput: () => change(control.name, places[input.value]) });
  const output = el("output", { for: input.id });
  return part(control, input, () => {
    const now = Number(value(control.name));
    // The address may name a number between two places.
    const distances = places.map((each) => Math.abs(Number(each) - now));
    input.value = Math.max(0, distances.indexOf(Math.min(...distances)));
    output.textContent = Number.isFinite(now) ? minus(now.toLocaleString("en-US")) : "?";
    input.setAttribute("aria-valuetext", output.textContent);
  }, output);
}

function part(control, input, update, output = null) {
  const node = el("div", { class: "control" }, el("label", { for: input.id }, control.label), input, output);
  return { node, update: () => { node.hidden = !meant(control); update(); } };
}
