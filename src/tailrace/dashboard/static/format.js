// Numbers as people read them.

export const NOTHING = "–";

export const isNumber = (value) => typeof value === "number" && Number.isFinite(value);

export function fixed(value, digits = 3) {
  return isNumber(value) ? value.toFixed(digits) : NOTHING;
}

export function compact(value) {
  if (!isNumber(value)) return NOTHING;
  const size = Math.abs(value);
  if (size >= 1e9) return `${(value / 1e9).toFixed(1)} G`;
  if (size >= 1e6) return `${(value / 1e6).toFixed(1)} M`;
  if (size >= 1e4) return `${(value / 1e3).toFixed(1)} k`;
  if (size >= 100 || Number.isInteger(value)) return Math.round(value).toLocaleString("en");
  return Number(value.toPrecision(3)).toString();
}

export function short(value) {
  if (!isNumber(value)) return NOTHING;
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e5)) return value.toExponential(1).replace("e+", "e");
  return Number(value.toPrecision(4)).toString();
}

export function seconds(value) {
  if (!isNumber(value)) return NOTHING;
  if (value < 0.00005) return "0 ms";
  if (value < 0.01) return `${(value * 1000).toFixed(1)} ms`;
  if (value < 1) return `${(value * 1000).toFixed(0)} ms`;
  if (value < 60) return `${value.toFixed(1)} s`;
  return clock(value);
}

export function clock(value) {
  if (!isNumber(value)) return NOTHING;
  const whole = Math.max(0, Math.round(value));
  const two = (number) => String(number).padStart(2, "0");
  const hours = Math.floor(whole / 3600);
  return hours ? `${hours}:${two(Math.floor(whole / 60) % 60)}:${two(whole % 60)}` : `${Math.floor(whole / 60)}:${two(whole % 60)}`;
}

export function bytes(value) {
  if (!isNumber(value)) return NOTHING;
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  for (; value >= 1024 && unit < units.length - 1; unit++) value /= 1024;
  return `${unit ? value.toFixed(1) : value} ${units[unit]}`;
}

export const percent = (value) => (isNumber(value) ? `${(100 * value).toFixed(value < 0.1 ? 1 : 0)} %` : NOTHING);

export function ago(at_s) {
  const past = Math.max(0, Date.now() / 1000 - at_s);
  if (past < 60) return "now";
  if (past < 3600) return `${Math.floor(past / 60)} min ago`;
  if (past < 86400) return `${Math.floor(past / 3600)} h ago`;
  return new Date(at_s * 1000).toISOString().slice(0, 10);
}
