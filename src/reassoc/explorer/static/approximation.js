// Panel "Approximation".
import { chart, powers } from "explorer/chart";
import { el, scroll, table } from "explorer/dom";
import { format } from "explorer/number";

const LOW = -1, HIGH = 3;

export const name = "approximation";

export function render({ truth, product, widths, exact, negative }, place) {
  const inside = (x) => typeof x === "number" && x <= HIGH && x >= LOW;
  const all = widths.flatMap(({ estimates }) => estimates);
  const outside = all.filter((x) => !inside(x)).length;
  const reach = ({ predicted }) => (typeof predicted === "number" ? predicted : 1e9);
  const last = widths.at(-1);
  place.replaceChildren(
    el("p", { class: "remark" }, `The truth is exp(q·k) = exp(${format(product)}) = `, el("data", { value: truth, class: "truth" }, format(truth)),
      `. One standard deviation of an estimate with ${last.m} projections is ${format(last.predicted, 3)} times that${exact ? "" : " at most"}.`),
    el("div", { class: "charts wide" }, chart(`Estimate over truth, ${widths[0].estimates.length} draws each`, {
      label: `Estimates divided by the truth against the number of projections, with a band of one predicted standard deviation around 1; ${outside} of ${all.length} estimates lie outside the picture.`,
      x: { label: "projections m", low: widths[0].m / 1.25, high: last.m * 1.25, log: true, ticks: powers(8, 1024, 2, String) },
      y: { label: "estimate / truth", low: LOW, high: HIGH, ticks: [[-1, "−1"], [0, "0"], [1, "1"], [2, "2"], [3, "3"]] },
      series: [
        { name: `one predicted standard deviation${exact ? "" : " (upper bound)"}`, kind: "band", look: "state", points: widths.map((width) => [width.m, 1 - reach(width), 1 + reach(width)]) },
        { name: "one draw", kind: "dots", look: "rescan", points: widths.flatMap(({ m, estimates }) => estimates.map((y, i) => [m * (1 + (i / (estimates.length - 1) - 0.5) * 0.3), y])) },
        { name: "mean of the draws", kind: "line", look: "other", points: widths.map(({ m, mean }) => [m, mean]) },
      ],
      marks: [{ y: 1 }],
    })),
    el("p", { class: "small" }, outside ? `${outside} of ${all.length} estimates lie outside the picture (arrows at its edge). ` : "",
      negative ? `${negative} are negative: a signed map can give such weights.` : ""),
    el("details", null, el("summary", null, "The numbers"), scroll("Estimates by number of projections",
      table(["m", "mean / truth", "deviation seen", exact ? "predicted" : "predicted, at most"], widths.map((width) =>
        el("tr", null, el("th", { scope: "row" }, String(width.m)), ...["mean", "deviation", "predicted"].map((part) => el("td", null, format(width[part], 4)))))))));
}
