// Queries, keys and values of one's own.
import { el } from "explorer/dom";
import { frozen } from "explorer/source";
import { set, setup, value } from "explorer/state";

const { rows: most, columns: widest, largest } = setup.limits;

// The numbers now shown, as rows of text: those in the address, else the preset's.
export function tables() {
  if (value("q") && value("k") && value("v")) {
    return { q: parse("q"), k: parse("k"), v: parse("v") };
  }
  const preset = setup.presets[value("preset")] ?? Object.values(setup.presets)[0];
  return { q: preset.query, k: preset.key, v: preset.value };
}

// Anything may stand in the address: of what is too much, the first part is there to be mended.
const parse = (name) => value(name).split(";").slice(0, most[name]).map((row) => row.split(",").slice(0, widest[name]));
const spell = (rows) => rows.map((row) => row.join(",")).join(";");

export function build(place) {
  if (frozen) {
    place.append(el("p", { class: "small" }, "This file shows the presets. To type in numbers of your own, run reassoc explore."));
    return () => {};
  }
  let shown = "";
  return () => {
    const now = tables();
    const text = [now.q, now.k, now.v].map(spell).join("|");
    // What was typed is on the page already: building it anew would take the focus away.
    if (text === shown) return;
    shown = text;
    const change = (next) => {
      shown = [next.q, next.k, next.v].map(spell).join("|");
      set({ q: spell(next.q), k: spell(next.k), v: spell(next.v), query: null, ...(next.k.length === now.k.length ? {} : { prefix: null }) });
    };
    const again = (next) => { change(next); shown = ""; place.dispatchEvent(new Event("rebuild")); };
    const cells = (name, i, what) => now[name][i].map((number, j) => el("input", {
      type: "number", step: "any", min: -largest, max: largest, required: true, value: String(number), "aria-label": `${what} ${i + 1}, entry ${j + 1}`,
      oninput: (event) => {
        // A wrong entry stays where it was typed, and out of the address: other entries go on working.
        if (!event.target.validity.valid) return;
        now[name] = now[name].map((row, a) => row.map((old, b) => (a === i && b === j ? event.target.value : old)));
        change(now);
      } }));
    const remove = (what, i, next) => el("button", { type: "button", class: "remove", "aria-label": `Remove ${what} ${i + 1}`, onclick: () => again(next()) }, "×");
    const add = (what, full, next) => el("button", { type: "button", disabled: full, onclick: () => again(next()) }, `Add a ${what}`);
    const without = (rows, i) => rows.filter((_, a) => a !== i);
    place.replaceChildren(
      el("fieldset", null, el("legend", null, "Queries"),
        ...now.q.map((_, i) => el("div", { class: "row" }, el("span", { class: "tag query" }, `q${i + 1}`), ...cells("q", i, "query"),
          now.q.length > 1 ? remove("query", i, () => ({ ...now, q: without(now.q, i) })) : null)),
        add("query", now.q.length >= most.q, () => ({ ...now, q: [...now.q, now.q.at(-1)] }))),
      el("fieldset", null, el("legend", null, "Keys and their values"),
        ...now.k.map((_, i) => el("div", { class: "row" }, el("span", { class: "tag key" }, `k${i + 1}`), ...cells("k", i, "key"),
          el("span", { class: "tag value" }, `v${i + 1}`), ...(now.v[i] ? cells("v", i, "value") : []),
          now.k.length > 1 ? remove("key", i, () => ({ ...now, k: without(now.k, i), v: without(now.v, i) })) : null)),
        add("key", now.k.length >= most.k, () => ({ ...now, k: [...now.k, now.k.at(-1)], v: [...now.v, now.v.at(-1)] }))));
  };
}
