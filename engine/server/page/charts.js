// Small line charts of the last two minutes: one or two series, a number, and nothing that moves by itself.

import { named } from "./colours.js";

const SPAN_S = 120;
const BREAK_S = 4; // nobody looked for so long: no line across

/**
 * A chart in a card. `series`: [{ of: point -> number or null, colour, fill, name }]; `most`: the least upper
 * end of the axis; `limit`: its highest; `label`: number -> text; `big` and `small`: point -> text.
 */
export class Chart {
  constructor(card, options) {
    Object.assign(this, { most: 0, limit: Infinity }, options);
    this.value = element("p", "value", card);
    this.detail = element("p", "detail quiet", card);
    const frame = element("div", "plot", card);
    this.canvas = element("canvas", "", frame);
    this.canvas.setAttribute("role", "img");
    this.title = card.querySelector("h2").textContent;
    this.top = 0;
    new ResizeObserver(() => this.draw()).observe(frame);
    this.points = [];
  }

  /** Draw these points; the last one is now. */
  show(points) {
    this.points = points;
    const last = points[points.length - 1];
    if (!last) return;
    text(this.value, this.big(last));
    text(this.detail, this.small(last));
    this.canvas.setAttribute("aria-label", `${this.title}, last two minutes: ${this.big(last)}, ${this.small(last)}`);
    this.draw();
  }

  draw() {
    const { canvas, points } = this;
    const ratio = devicePixelRatio || 1;
    const width = canvas.clientWidth, height = canvas.clientHeight;
    if (!width) return;
    if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
      canvas.width = Math.round(width * ratio);
      canvas.height = Math.round(height * ratio);
    }
    const context = canvas.getContext("2d");
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.clearRect(0, 0, width, height);
    const now = points.length ? points[points.length - 1].t : 0;
    const shown = points.filter((point) => point.t >= now - SPAN_S - 2);
    const highest = Math.max(0, ...shown.flatMap((p) => this.series.map((s) => s.of(p) ?? 0)));
    this.top = Math.min(this.limit, roundUp(Math.max(highest, this.most)));
    const place = {
      x: (t) => width - ((now - t) / SPAN_S) * width,
      y: (value) => height - 1.5 - (Math.min(value, this.top) / (this.top || 1)) * (height - 4),
    };
    this.#axis(context, width, height);
    for (const series of this.series) this.#line(context, shown, series, place, height);
    if (!this.top) return;
    context.fillStyle = named("--soft");
    context.font = `10px ${getComputedStyle(canvas).fontFamily}`;
    context.textBaseline = "top";
    // Lines may pass behind it.
    context.strokeStyle = named("--card");
    context.lineWidth = 3;
    context.strokeText(this.label(this.top), 0, 4);
    context.fillText(this.label(this.top), 0, 4);
  }

  #axis(context, width, height) {
    context.fillStyle = named("--line");
    context.fillRect(0, 1, width, 1);
    context.fillRect(0, height - 1, width, 1);
  }

  #line(context, points, series, place, height) {
    const colour = named(series.colour);
    const pieces = [];
    let before = -Infinity, piece = null;
    for (const point of points) {
      const value = series.of(point);
      if (value === null || value === undefined) {
        piece = null;
        continue;
      }
      if (piece === null || point.t - before > BREAK_S) pieces.push((piece = []));
      piece.push([place.x(point.t), place.y(value)]);
      before = point.t;
    }
    context.lineWidth = 1.5;
    context.lineJoin = context.lineCap = "round";
    for (const piece of pieces) {
      context.beginPath();
      piece.forEach(([x, y], i) => (i ? context.lineTo(x, y) : context.moveTo(x, y)));
      if (piece.length === 1) context.lineTo(piece[0][0] + 0.1, piece[0][1]);
      context.strokeStyle = colour;
      context.stroke();
      if (series.fill && piece.length > 1) {
        context.lineTo(piece[piece.length - 1][0], height - 1);
        context.lineTo(piece[0][0], height - 1);
        context.globalAlpha = 0.12;
        context.fillStyle = colour;
        context.fill();
        context.globalAlpha = 1;
      }
    }
  }
}

/** The next of 1, 1.5, 2, 3, 4, 5, 6, 8 times a power of ten. */
function roundUp(value) {
  if (!value) return 0;
  const power = 10 ** Math.floor(Math.log10(value));
  for (const mantissa of [1, 1.5, 2, 3, 4, 5, 6, 8, 10]) {
    if (mantissa * power >= value * (1 - 1e-9)) return mantissa * power;
  }
  return 10 * power;
}

export function element(tag, names, parent) {
  const made = document.createElement(tag);
  if (names) made.className = names;
  parent?.append(made);
  return made;
}

/** Set an element's text if it is another: an unchanged one is not drawn, selected or read out again. */
export function text(target, value) {
  if (target.textContent !== value) target.textContent = value;
}
