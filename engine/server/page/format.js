// Numbers as people read them.

const whole = new Intl.NumberFormat("en");

/** 12,345 */
export function count(value) {
  return whole.format(Math.round(value));
}

/** 96.9, 1,204: three significant digits, more only before the point. */
export function rate(value) {
  if (value >= 100 || value === 0) return count(value);
  return value.toFixed(value >= 10 ? 1 : 2);
}

/** 0.342 as "34 %", 0.0213 as "2.1 %". */
export function percent(share) {
  const value = 100 * share;
  return `${value >= 10 || value === 0 ? Math.round(value) : value.toFixed(1)} %`;
}

/** Seconds as µs, ms or s. */
export function seconds(value) {
  if (value >= 100) return `${count(value)} s`;
  if (value >= 0.9995) return `${value.toFixed(value >= 9.995 ? 1 : 2)} s`;
  const ms = 1000 * value;
  if (ms >= 0.0995) return `${ms >= 99.5 ? Math.round(ms) : ms.toFixed(ms >= 9.95 ? 1 : 2)} ms`;
  return `${Math.round(1000 * ms)} µs`;
}

/** An age: "7 s", "3 min 05 s", "2 h 10 min", "4 d 3 h". */
export function age(value) {
  const s = Math.floor(value);
  const two = (n) => String(n).padStart(2, "0");
  if (s < 60) return `${s} s`;
  if (s < 3600) return `${Math.floor(s / 60)} min ${two(s % 60)} s`;
  if (s < 86400) return `${Math.floor(s / 3600)} h ${two(Math.floor((s % 3600) / 60))} min`;
  return `${Math.floor(s / 86400)} d ${Math.floor((s % 86400) / 3600)} h`;
}
