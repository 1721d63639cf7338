// Panel "Cost".
import { chart, powers } from "explorer/chart";
import { el, scroll, table } from "explorer/dom";
import { format, whole } from "explorer/number";
import { setup, value } from "explorer/state";

const RAISED = "⁰¹²³⁴⁵⁶⁷⁸⁹";
const ten = (_, power) => `10${[...String(Math.abs(power))].map((digit) => RAISED[digit]).join("").replace(/^/, power < 0 ? "⁻" : "")}`;
const short = (n) => (n >= 2 ** 20 ? `${n / 2 ** 20}M` : n >= 1024 ? `${n / 1024}k` : String(n));

export const name = "cost";

export function render(answer, place) {
  const { counts, ratios, lines, crossover } = answer;
  const n = Number(value("n"));
  const rows = [
    ["Scores against steps", "n² : 2n", counts.pairs, counts.passes, ratios.steps],
    ["Multiply-adds", "n²(r + e) : 2nr(e + 1)", counts.quadratic, counts.linear, ratios.arithmetic],
    ["Numbers kept", "n² : re + r", counts.scores, counts.state, ratios.memory],
  ];
  place.replaceChildren(
    scroll("Counts at n tokens", table(["", "formula", "rescan", "state", "ratio"], rows.map(([what, formula, slow, fast, ratio]) =>
      el("tr", null, el("th", { scope: "row" }, what), el("td", { class: "formula" }, formula), el("td", null, whole(slow)), el("td", null, whole(fast)),
        el("td", { class: ratio > 1 ? "good" : "bad" }, `${format(ratio, 3)} ×`))))),
    el("p", { class: "remark" }, `With these sizes the state takes fewer multiply-adds from about ${format(crossover, 3)} tokens on.`),
    el("div", { class: "charts" },
      counted("Steps: every query rescans every key, or reads once", "steps", lines, ["pairs", "passes"], ["n²", "2n"], n),
      counted("Multiply-adds, with r features and values of size e", "multiply-adds", lines, ["quadratic", "linear"], ["n²(r + e)", "2nr(e + 1)"], n),
      measured()));
}

function counted(title, unit, lines, parts, names, n) {
  const all = lines.flatMap((line) => parts.map((part) => line[part]));
  const x = { label: "tokens n", low: lines[0].n, high: lines.at(-1).n, log: true };
  const y = { label: unit, low: Math.min(...all), high: Math.max(...all), log: true };
  return chart(title, {
    label: `${title}: along the number of tokens, both on logarithmic axes; the curve of rescanning is twice as steep.`,
    x: { ...x, ticks: powers(x.low, x.high, 2, short, 4) }, y: { ...y, ticks: powers(y.low, y.high, 10, ten, y.high / y.low > 1e9 ? 3 : 2) },
    series: parts.map((part, i) => ({ name: names[i], kind: "line", look: i ? "state" : "rescan", points: lines.map((line) => [line.n, line[part]]) })),
    marks: [{ x: n, text: `n = ${short(n)}` }],
  });
}

function measured() {
  const { rows, about, here, command } = setup.measured;
  const names = [...new Set(rows.map((row) => row.name))];
  const lengths = rows.map((row) => row.length);
  const times = rows.flatMap((row) => [row.lower, row.upper]).map((seconds) => seconds * 1000);
  const x = { label: "tokens n", low: Math.min(...lengths), high: Math.max(...lengths), log: true };
  const y = { label: "milliseconds", low: Math.min(...times) / 1.5, high: Math.max(...times) * 1.5, log: true };
  const soft = (each) => each.startsWith("softmax");
  const figure = chart("Measured: one forward pass", {
    label: `Measured times of a forward pass along the number of tokens: ${names.join(", ")}.`,
    x: { ...x, ticks: powers(x.low, x.high, 2, short, 2) }, y: { ...y, ticks: powers(y.low, y.high, 10, (ms) => format(ms)) },
    series: names.flatMap((each, i) => {
      const own = rows.filter((row) => row.name === each);
      const look = soft(each) ? "rescan" : i === 0 ? "state" : "other";
      return [{ kind: "band", look, points: own.map((row) => [row.length, row.lower * 1000, row.upper * 1000]) },
        { name: each, kind: "line", look, points: own.map((row) => [row.length, row.seconds * 1000]) }];
    }),
  });
  figure.append(el("p", { class: "small" }, `${here ? "Your bench" : "Not your machine"}: ${about}. Medians and quartiles of: `, el("code", null, command), ". ",
    here ? null : "For times of your own, run reassoc bench --out mine, then reassoc explore --bench mine."));
  return figure;
}
