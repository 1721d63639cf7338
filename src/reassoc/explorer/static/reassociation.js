// Panel "Reassociation": the naive rescan and the running state, side by side.
import * as editor from "explorer/editor";
import { el, scroll, svg, table } from "explorer/dom";
import { format, vector } from "explorer/number";
import { listen, set, setup, value } from "explorer/state";

export const name = "reassociation";

const place = (id) => document.getElementById(id);
const refreshEditor = editor.build(place("editor"));
place("editor").addEventListener("rebuild", refreshEditor);
listen(refreshEditor);
refreshEditor();
const slider = place("prefix");
slider.addEventListener("input", () => set({ prefix: slider.value === slider.max ? null : slider.value }));
let drawn = null;

// Another preset brings its own map, and is looked at from its end.
export function more(changes) {
  const preset = setup.presets[changes.preset];
  return preset ? { ...changes, map: preset.map, nu: null, q: null, k: null, v: null, query: null, prefix: null } : changes;
}

export function render(answer) {
  const { q, k, v } = editor.tables();
  const query = index("query", q.length - 1, 0), prefix = index("prefix", k.length, k.length);
  const preset = setup.presets[value("preset")];
  place("preset-note").textContent = value("q") ? "Numbers of your own; choosing a preset leaves them." : preset.note;
  place("map-notes").textContent = answer.notes.join(" ");
  if (drawn !== answer) {
    drawn = answer;
    switches(q);
    slider.max = k.length;
  }
  for (const input of place("queries").querySelectorAll("input")) input.checked = Number(input.value) === query;
  slider.value = prefix;
  const words = prefix === 0 ? `no key of ${k.length}` : `keys 1 to ${prefix} of ${k.length}`;
  place("prefix-value").textContent = words;
  slider.setAttribute("aria-valuetext", words);
  const seen = answer.prefixes[prefix];
  place("rescan").replaceChildren(rescan(answer, seen, query, prefix, k, v));
  place("running").replaceChildren(running(answer, seen, query));
  place("results").replaceChildren(...results(seen, query, prefix));
}

// Which part is shown comes from the address, where anything may stand.
function index(parameter, most, usual) {
  const text = value(parameter);
  if (text === undefined) return usual;
  if (/^\d{1,4}$/.test(text) && Number(text) <= most) return Number(text);
  throw new Error(`${parameter} must be a whole number from 0 to ${most}; the address says '${text.slice(0, 40)}'`);
}

function switches(q) {
  place("queries").replaceChildren(el("legend", null, "Query"), ...q.map((row, i) => el("label", { class: "pill" },
    el("input", { type: "radio", name: "query", value: i, onchange: () => set({ query: i === 0 ? null : String(i) }) }),
    el("span", null, vector(row.map(Number))))));
}

const cell = (content, look) => el("td", { class: look ?? null }, content);
const printed = (numbers, look) => el("td", { class: look ?? null }, el("data", { value: [numbers].flat().join(" ") }, vector([numbers].flat())));

function rescan(answer, seen, query, prefix, k, v) {
  const weights = [0, ...seen.weights[query], ...seen.softmax_weights[query]].filter(Number.isFinite);
  const span = [Math.min(...weights), Math.max(...weights)];
  const rows = k.map((key, j) => {
    const inside = j < prefix;
    return el("tr", { class: inside ? (seen.weights[query][j] < 0 ? "negative" : null) : "later" },
      el("th", { scope: "row" }, `k${j + 1}`), printed(key.map(Number), "key"), features(answer.key_features[j]), printed(v[j].map(Number), "value"),
      inside ? printed(answer.scores[query][j]) : cell("not seen", "soft"),
      inside ? printed(answer.terms[query][j]) : cell(""),
      ...(inside ? [weight(seen.weights[query][j], span, "kernel"), weight(seen.softmax_weights[query][j], span, "softmax")] : [cell(""), cell("")]));
  });
  const { numerator, denominator } = seen.rescan[query];
  rows.push(el("tr", { class: "sum" }, el("th", { scope: "row", colspan: 4 }, "sum over keys"), printed(denominator, "denominator"), printed(numerator, "numerator"), cell(""), cell("")));
  return scroll("Every key scored against the query", table(["", "k", "φ(k)", "v", "score", "score × v", "weight", "softmax"], rows));
}

// Few features as numbers, more as bars.
function features(numbers) {
  if (vector(numbers).length <= 26) return printed(numbers);
  const all = [0, ...numbers.filter(Number.isFinite)];
  const low = Math.min(...all), span = Math.max(...all) - low || 1, step = 104 / numbers.length;
  const at = (x) => 21 - (20 * (x - low)) / span;
  return el("td", null, svg("svg", { class: "features", viewBox: "0 0 104 22", role: "img", "aria-label": vector(numbers) },
    ...numbers.map((x, i) => (Number.isFinite(x)
      ? svg("rect", { x: i * step, y: Math.min(at(0), at(x)), width: step * 0.8, height: Math.abs(at(x) - at(0)) }) : null)),
    svg("path", { class: "axis", d: `M0 ${at(0)}H104` })));
}

// A weight and its bar; kernel and softmax weights of one query have one scale.
function weight(number, [low, high], look) {
  const at = (x) => (100 * (x - low)) / (high - low || 1);
  const sign = number < 0 ? "less" : look;
  const bar = Number.isFinite(number) ? svg("rect", { class: sign, x: Math.min(at(0), at(number)), y: 0, width: Math.abs(at(number) - at(0)), height: 5 }) : null;
  return el("td", { class: "weight" }, el("data", { value: number }, format(number, 4)), number < 0 ? el("span", { class: "flag" }, " negative") : null,
    svg("svg", { class: "bar", viewBox: "0 0 100 5", preserveAspectRatio: "none", "aria-hidden": true }, bar));
}

function running(answer, seen, query) {
  const features = answer.query_features[query];
  const columns = seen.S[0].length;
  const heads = ["", "φ(q)", ...Array.from({ length: columns }, (_, c) => (columns === 1 ? "S" : `S · ${c + 1}`)), "z"];
  const rows = features.map((feature, i) => el("tr", null, el("th", { scope: "row" }, String(i + 1)), printed(feature),
    ...seen.S[i].map((now, c) => grown(now, seen.added_S[i][c], "state")), grown(seen.z[i], seen.added_z[i], "normalizer")));
  const { numerator, denominator } = seen.state[query];
  rows.push(el("tr", { class: "sum" }, el("th", { scope: "row", colspan: 2 }, "φ(q) · column"), ...numerator.map((x) => printed(x, "numerator")), printed(denominator, "denominator")));
  return scroll("The state, and the query's read of it", table(heads, rows));
}

// An entry of the state, and what the last key's outer product added to it.
function grown(now, added, look) {
  const sign = typeof added === "number" && added > 0 ? "+" : "";
  return el("td", { class: look }, el("data", { value: now }, format(now)), added === 0 ? null : el("ins", null, sign + format(added, 4)));
}

function results(seen, query, prefix) {
  const slow = seen.rescan[query], fast = seen.state[query], gone = seen.undefined[query];
  const quotient = ({ numerator, denominator }) => `${vector(numerator)} / ${format(denominator)}`;
  const card = (id, title, output, small) => el("div", { class: `card ${id}` }, el("h3", null, title),
    el("p", { class: "number" }, output), el("p", { class: "small" }, small));
  const number = (output) => el("data", { value: output.join(" ") }, vector(output));
  const cards = el("div", { class: "cards" },
    card("slow", "Rescan", gone ? "Unavailable" : number(slow.output), quotient(slow)),
    el("div", { class: "equals", "aria-hidden": true }, "="),
    card("fast", "State", gone ? "Unavailable" : number(fast.output), quotient(fast)),
    card("soft", "Softmax attention", prefix === 0 ? "no key" : number(seen.softmax[query]), "exp(q·k / √d), normalized"));
  if (!gone) {
    const apart = seen.difference[query];
    return [cards, el("p", { class: "small" }, `Rescan and state differ by ${format(apart)}${apart === 0 ? "" : ": rounding"}.`,
      seen.beyond[query] ? " The sums as shown leave the range of a float64; the library keeps their logarithms, so the output is none the worse." : null)];
  }
  const why = prefix === 0 ? "no key is visible, so there is nothing to average" : "the denominator φ(q)·z is exactly zero, so no average exists";
  return [cards, el("div", { class: "unavailable" },
    el("p", null, el("strong", null, "Unavailable: "), `${why}. No epsilon hides it; undefined= decides what a call returns:`),
    el("dl", null, ...Object.entries(gone).flatMap(([policy, gives]) => [el("dt", null, el("code", null, `"${policy}"`)), el("dd", null, gives)])))];
}
