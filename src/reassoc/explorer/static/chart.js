// Line charts as inline SVG, drawn at the width there is, so that their text keeps its size.
import { el, svg } from "explorer/dom";

const LEFT = 58, RIGHT = 14, TOP = 12, BOTTOM = 44;
let count = 0;

// A figure: title, drawing, legend. `spec`: label (what one sees, in words), x and y
// ({ label, low, high, log, ticks: [[number, text]] }), series ({ name, kind: "line" | "dots" | "band",
// look: a class, points }), marks ({ x | y, text }).
export function chart(title, spec) {
  const drawing = el("div", { class: "drawing" });
  const named = spec.series.filter(({ name }) => name);
  const figure = el("figure", null, el("figcaption", null, title), drawing,
    el("ul", { class: "legend" }, ...named.map(({ name, kind, look }) =>
      el("li", null, svg("svg", { viewBox: "0 0 26 12", class: "swatch", "aria-hidden": true }, sample(kind, look)), name))));
  new ResizeObserver(() => {
    const width = Math.floor(drawing.clientWidth);
    if (width > 0 && drawing.dataset.width !== String(width)) {
      drawing.dataset.width = width;
      drawing.replaceChildren(draw(spec, width, Math.max(220, Math.min(330, width * 0.62))));
    }
  }).observe(drawing);
  return figure;
}

function sample(kind, look) {
  if (kind === "band") return svg("rect", { x: 1, y: 1, width: 24, height: 10, class: `band ${look}` });
  if (kind === "dots") return svg("circle", { cx: 13, cy: 6, r: 3.5, class: `dot ${look}` });
  return svg("path", { d: "M1 6H25", class: `line ${look}` });
}

function draw(spec, width, height) {
  const across = scale(spec.x, LEFT, width - RIGHT);
  const up = scale(spec.y, height - BOTTOM, TOP);
  const inside = `clip${++count}`;
  const at = ([x, y]) => `${across(x).toFixed(1)} ${up(y).toFixed(1)}`;
  return svg("svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "img", "aria-label": spec.label },
    svg("clipPath", { id: inside }, svg("rect", { x: LEFT, y: TOP, width: width - LEFT - RIGHT, height: height - TOP - BOTTOM })),
    ...spec.y.ticks.flatMap(([y, text]) => [
      svg("path", { class: "grid", d: `M${LEFT} ${up(y)}H${width - RIGHT}` }),
      svg("text", { x: LEFT - 7, y: up(y) + 4, "text-anchor": "end" }, text)]),
    ...spec.x.ticks.map(([x, text]) => svg("text", { x: across(x), y: height - BOTTOM + 18, "text-anchor": "middle" }, text)),
    svg("path", { class: "axis", d: `M${LEFT} ${TOP}V${height - BOTTOM}H${width - RIGHT}` }),
    svg("text", { class: "title", x: (LEFT + width - RIGHT) / 2, y: height - 6, "text-anchor": "middle" }, spec.x.label),
    svg("text", { class: "title", x: 14, y: (TOP + height - BOTTOM) / 2, "text-anchor": "middle",
      transform: `rotate(-90 14 ${(TOP + height - BOTTOM) / 2})` }, spec.y.label),
    svg("g", { "clip-path": `url(#${inside})` },
      ...spec.series.map(({ kind, look, points }) => {
        if (kind === "dots") return svg("g", null, ...points.map((point) => dot(point, spec.y, across, up, look)));
        const edge = kind === "band" ? [...points.map(([x, , high]) => [x, high]), ...points.map(([x, low]) => [x, low]).reverse()] : points;
        return svg("path", { class: `${kind} ${look}`, d: `M${edge.map((point) => at(bounded(point, spec.y))).join("L")}${kind === "band" ? "Z" : ""}` });
      }),
      ...(spec.marks ?? []).map(({ x, y }) => svg("path", { class: "mark", d: x === undefined ? `M${LEFT} ${up(y)}H${width - RIGHT}` : `M${across(x)} ${TOP}V${height - BOTTOM}` }))),
    ...(spec.marks ?? []).filter(({ text }) => text).map(({ x, text }) => {
      const left = across(x) > width - RIGHT - 8 * text.length;
      return svg("text", { class: "note", x: across(x) + (left ? -5 : 5), y: TOP + 11, "text-anchor": left ? "end" : "start" }, text);
    }));
}

function scale({ low, high, log }, from, to) {
  const turn = log ? Math.log : (x) => x;
  return (x) => from + ((turn(x) - turn(low)) / (turn(high) - turn(low))) * (to - from);
}

// Far outside is far enough: an SVG path with enormous coordinates is drawn wrong. Text is an infinity.
function bounded([x, y], axis) {
  const span = axis.high - axis.low;
  if (typeof y === "string") return [x, y === "-Infinity" ? axis.low - span : axis.high + span];
  return [x, axis.log ? Math.max(y, axis.low / 10) : Math.max(axis.low - span, Math.min(axis.high + span, y))];
}

// A dot outside the range is an arrow at the edge.
function dot([x, y], axis, across, up, look) {
  const [, near] = bounded([x, y], axis);
  if (near > axis.high) return svg("path", { class: `dot out ${look}`, d: `M${across(x)} ${up(axis.high) + 1}l4 7h-8z` });
  if (near < axis.low) return svg("path", { class: `dot out ${look}`, d: `M${across(x)} ${up(axis.low) - 1}l4 -7h-8z` });
  return svg("circle", { class: `dot ${look}`, cx: across(x), cy: up(near), r: 2.6 });
}

// Ticks of a logarithmic axis, as powers of `base`.
export function powers(low, high, base, text, step = 1) {
  const found = [];
  for (let power = Math.ceil(Math.log(low) / Math.log(base) - 1e-9); base ** power <= high * 1.0001; power += step) found.push([base ** power, text(base ** power, power)]);
  return found;
}
