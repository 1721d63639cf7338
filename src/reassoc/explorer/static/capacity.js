// Panel "Capacity": what comes back of stored pairs, and a key written again.
import { chart } from "explorer/chart";
import { el, scroll, table } from "explorer/dom";
import { format } from "explorer/number";
import { value } from "explorer/state";

const RULES = { sum: "rescan", delta: "state", "gated delta": "other" };
const HIGH = 1.5;

export const name = "capacity";

export function render({ features, lines, maps }, place) {
  const pairs = Number(value("pairs"));
  const shade = (error, bound) => (error < 0.05 ? "good" : error >= 1 ? "bad" : bound > 0.3 ? "soft" : null);
  const last = lines.at(-1).pairs;
  place.replaceChildren(
    el("div", { class: "charts" },
      chart(`Retrieval error with ${features} features`, {
        label: `Relative squared error of what is read back, along the number of stored pairs, for the sum, delta and gated delta rules, with the bound that no rule can pass; the map has ${features} features.`,
        x: { label: "stored pairs N", low: 1, high: last, log: true, ticks: [1, 2, 4, 8, 16, 32, 64].map((n) => [n, String(n)]) },
        y: { label: "squared error", low: 0, high: HIGH, ticks: [0, 0.5, 1, 1.5].map((y) => [y, String(y)]) },
        series: [
          { name: "no rule can do better", kind: "band", look: "plain", points: lines.map((line) => [line.pairs, 0, line.bound]) },
          ...Object.entries(RULES).map(([rule, look]) => ({ name: rule, kind: "line", look, points: lines.map((line) => [line.pairs, line[rule]]) })),
        ],
        marks: [{ x: features, text: `r = ${features}` }, { y: 1 }],
      }),
      el("div", null, el("h3", null, `All maps, ${pairs} pairs`), scroll("Retrieval error of all maps",
        table(["map", "r", ...Object.keys(RULES), "bound"], maps.map((row) =>
          el("tr", null, el("th", { scope: "row" }, row.name), el("td", null, String(row.features)),
            ...Object.keys(RULES).map((rule) => el("td", { class: shade(row[rule], row.bound) }, format(row[rule], 3))), el("td", null, format(row.bound, 3)))))),
      el("p", { class: "small" }, "0 is perfect, 1 as bad as reading nothing; means over eight draws of random keys of size 8. The sum rule is divided by its denominator: with a signed map (identity) that can nearly vanish, and the error is then enormous."))));
}

export const overwriting = {
  name: "overwriting",
  render({ writes }, place) {
    const keys = Object.keys(writes[0].wanted);
    const all = writes.flatMap(({ reads }) => Object.keys(RULES).map((rule) => reads[rule].a));
    const low = Math.floor(Math.min(-2, ...all.filter(Number.isFinite))), high = Math.ceil(Math.max(3, ...all.filter(Number.isFinite)));
    const step = high - low > 12 ? 5 : 1;
    const ticks = Array.from({ length: high - low + 1 }, (_, i) => low + i).filter((y) => y % step === 0).map((y) => [y, format(y)]);
    const steps = writes.flatMap(({ wanted }, i) => [[i + 0.5, wanted.a], [i + 1.5, wanted.a]]);
    place.replaceChildren(
      el("div", { class: "charts wide" },
        chart("What reading key a gives after each write", {
          label: "What each rule returns for key a after each of six writes, beside the value last written to it.",
          x: { label: "write", low: 0.5, high: writes.length + 0.5, ticks: writes.map(({ key, value: written }, i) => [i + 1, `${key}←${format(written)}`]) },
          y: { label: "value read", low, high, ticks },
          series: [{ name: "last value written to a", kind: "line", look: "wanted", points: steps },
            ...Object.entries(RULES).map(([rule, look]) => ({ name: rule, kind: "line", look, points: writes.map(({ reads }, i) => [i + 1, reads[rule].a]) }))],
        })),
      scroll("What every key reads after each write", table(
        ["write", ...keys.flatMap(() => ["wanted", ...Object.keys(RULES)])],
        writes.map(({ key, value: written, reads, wanted }) => el("tr", null, el("th", { scope: "row" }, `${key} ← ${format(written)}`),
          ...keys.flatMap((each) => [el("td", { class: "wanted" }, format(wanted[each])),
            ...Object.keys(RULES).map((rule) => el("td", { class: wanted[each] === null ? "soft" : near(reads[rule][each], wanted[each]) ? "good" : null }, format(reads[rule][each], 3)))]))),
        keys.map((key) => [`reading ${key}`, 4]))));
  },
};

const near = (read, wanted) => Math.abs(read - wanted) < 0.005 * Math.max(1, Math.abs(wanted));
