// Numbers as people read them: six digits, a power of ten where that is shorter.
const SPECIAL = { NaN: "NaN", Infinity: "∞", "-Infinity": "−∞" };
const RAISED = { "-": "⁻", 0: "⁰", 1: "¹", 2: "²", 3: "³", 4: "⁴", 5: "⁵", 6: "⁶", 7: "⁷", 8: "⁸", 9: "⁹" };

export function format(number, digits = 6) {
  if (number === null || number === undefined) return "–";
  if (typeof number === "string") return SPECIAL[number];
  const size = Math.abs(number);
  if (size === 0 || (size >= 1e-4 && size < 1e6)) {
    return minus(String(Number(number.toPrecision(digits)) || 0));
  }
  const [mantissa, exponent] = number.toExponential(Math.max(1, digits - 3)).split("e");
  return `${minus(String(Number(mantissa)))} × 10${[...String(Number(exponent))].map((c) => RAISED[c]).join("")}`;
}

export const vector = (numbers) => (numbers.length === 1 ? format(numbers[0]) : `(${numbers.map((x) => format(x)).join(", ")})`);

export const whole = (number) => number.toLocaleString("en-US");

export const minus = (text) => text.replace("-", "−");
