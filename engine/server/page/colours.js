// Colours: those of the style sheet, and one for each sequence that is its own for as long as it lives.

const dark = matchMedia("(prefers-color-scheme: dark)");
const cache = new Map();

/** Call `heard` when the scheme changes between light and dark. */
export function onScheme(heard) {
  dark.addEventListener("change", () => {
    cache.clear();
    heard();
  });
}

/** A colour of the style sheet, such as "--ink". */
export function named(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

/**
 * The colour of a sequence, a function of its number alone. Hues step by the golden angle, so that neighbours
 * in time differ most; lightness steps too, to tell apart those whose hues come close (13, 21, 34 apart).
 */
export function ofSequence(id) {
  let colour = cache.get(id);
  if (colour === undefined) {
    const lightness = (dark.matches ? [0.66, 0.75, 0.57, 0.7, 0.61] : [0.66, 0.77, 0.56, 0.71, 0.61])[id % 5];
    colour = fromOklch(lightness, 0.095, (id * 137.508 + 215) % 360);
    if (cache.size > 4096) cache.clear();
    cache.set(id, colour);
  }
  return colour;
}

/** OKLCH to "rgb(r g b)" (Ottosson 2020); what lies outside of sRGB is clipped. */
function fromOklch(L, C, degrees) {
  const hue = (degrees * Math.PI) / 180;
  const a = C * Math.cos(hue), b = C * Math.sin(hue);
  const l = (L + 0.3963377774 * a + 0.2158037573 * b) ** 3;
  const m = (L - 0.1055613458 * a - 0.0638541728 * b) ** 3;
  const s = (L - 0.0894841775 * a - 1.291485548 * b) ** 3;
  const linear = [
    4.0767416621 * l - 3.3077115913 * m + 0.2309699292 * s,
    -1.2684380046 * l + 2.6097574011 * m - 0.3413193965 * s,
    -0.0041960863 * l - 0.7034186147 * m + 1.707614701 * s,
  ];
  const bytes = linear.map((value) => {
    const x = Math.min(1, Math.max(0, value));
    return Math.round(255 * (x <= 0.0031308 ? 12.92 * x : 1.055 * x ** (1 / 2.4) - 0.055));
  });
  return `rgb(${bytes.join(" ")})`;
}
