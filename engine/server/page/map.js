// The pool as a grid of cells: one a block, or, in a pool too large for that, one for several.

import { named, ofSequence } from "./colours.js";

const FREE = 0, CACHED = 1, QUARANTINED = 2, FIRST_OWNED = 3;
const LARGEST = 26, SMALLEST = 4; // CSS pixels from cell to cell

const owner = (code) => (code < FIRST_OWNED ? null : Math.floor((code - FIRST_OWNED) / 2));
const isShared = (code) => code >= FIRST_OWNED && (code - FIRST_OWNED) % 2 === 1;

/** Codes are the server's: 0 free, 1 cached, 2 quarantined, else 3 + 2 * sequence (+ 1 if shared). */
export class BlockMap {
  /**
   * `pointed(sequence or null, text or null)` is called as the pointer moves over the cells,
   * `laidOut(blocks in a cell)` when their size changes.
   */
  constructor(canvas, pointed, laidOut) {
    this.canvas = canvas;
    this.codes = new Float64Array(0);
    this.lit = null;
    this.pointed = pointed;
    this.laidOut = laidOut;
    new ResizeObserver(() => this.layout()).observe(canvas.parentElement);
    canvas.addEventListener("pointermove", (event) => this.#point(event));
    canvas.addEventListener("pointerleave", () => this.pointed(null, null));
  }

  reset(numBlocks) {
    if (this.codes.length === numBlocks) return;
    this.codes = new Float64Array(numBlocks);
    this.layout();
  }

  /** All codes, as (code, length) pairs. */
  setAll(runs) {
    let at = 0;
    for (let i = 0; i < runs.length; i += 2) this.codes.fill(runs[i], at, (at += runs[i + 1]));
    this.draw();
  }

  /** Some codes, as (first, length, code) triples. */
  change(runs) {
    const dirty = new Set();
    for (let i = 0; i < runs.length; i += 3) {
      const [first, length, code] = [runs[i], runs[i + 1], runs[i + 2]];
      this.codes.fill(code, first, first + length);
      const last = Math.floor((first + length - 1) / this.perCell);
      for (let cell = Math.floor(first / this.perCell); cell <= last; cell++) dirty.add(cell);
    }
    if (!dirty.size || !this.step) return;
    const context = this.#context();
    for (const cell of dirty) this.#cell(context, cell);
  }

  /** Let one sequence's blocks stand out; null: none. */
  light(sequence) {
    if (this.lit === sequence) return;
    this.lit = sequence;
    this.draw();
  }

  /** Choose the largest cells with which the pool fits. */
  layout() {
    const box = this.canvas.parentElement;
    const ratio = devicePixelRatio || 1, count = this.codes.length;
    const width = Math.floor(box.clientWidth * ratio);
    const height = parseFloat(getComputedStyle(box).getPropertyValue("--height")) * ratio;
    if (!count || !width) return;
    this.perCell = 1;
    let step = Math.round(LARGEST * ratio);
    const smallest = Math.round(SMALLEST * ratio);
    while (step > smallest && Math.ceil(count / Math.floor(width / step)) * step > height) step -= 1;
    this.columns = Math.floor(width / step);
    const room = this.columns * Math.floor(height / step);
    this.perCell = Math.max(1, Math.ceil(count / room));
    this.numCells = Math.ceil(count / this.perCell);
    this.step = step;
    this.size = step - Math.max(1, Math.round(step / (step >= 10 * ratio ? 7 : 5)));
    this.canvas.width = width;
    this.canvas.height = Math.ceil(this.numCells / this.columns) * step;
    this.canvas.style.height = `${this.canvas.height / ratio}px`;
    this.laidOut(this.perCell);
    this.draw();
  }

  draw() {
    if (!this.step) return;
    this.paint = Object.fromEntries(
      ["--card", "--block-free", "--block-cached", "--block-quarantined"].map((name) => [name, named(name)]),
    );
    const context = this.#context();
    context.clearRect(0, 0, this.canvas.width, this.canvas.height);
    for (let cell = 0; cell < this.numCells; cell++) this.#cell(context, cell);
  }

  #context() {
    return (this.context ??= this.canvas.getContext("2d"));
  }

  /** What a cell shows: its commonest owner or kind, and how much of it is in use. */
  #summary(cell) {
    if (this.perCell === 1) {
      const code = this.codes[cell];
      return { code, share: 1, shared: isShared(code) };
    }
    const counts = new Map();
    const first = cell * this.perCell, last = Math.min(this.codes.length, first + this.perCell);
    let inUse = 0, shared = false;
    for (let block = first; block < last; block++) {
      const code = this.codes[block], base = isShared(code) ? code - 1 : code;
      counts.set(base, (counts.get(base) ?? 0) + 1);
      if (code !== FREE) inUse += 1;
      shared ||= isShared(code);
    }
    let best = FREE, most = 0;
    for (const [code, count] of counts) {
      // A single owned block in a free neighbourhood is what one wants to see.
      const weight = code >= FIRST_OWNED ? 1000 + count : code === FREE ? 0 : count;
      if (weight > most) [best, most] = [code, weight];
    }
    return { code: best, share: inUse / (last - first), shared };
  }

  #cell(context, cell) {
    const { code, share, shared } = this.#summary(cell);
    const x = (cell % this.columns) * this.step, y = Math.floor(cell / this.columns) * this.step, size = this.size;
    const radius = size >= 9 ? Math.round(size / 6) : 0;
    const box = () => {
      context.beginPath();
      if (radius) context.roundRect(x, y, size, size, radius);
      else context.rect(x, y, size, size);
      context.fill();
    };
    context.clearRect(x, y, this.step, this.step);
    context.fillStyle = this.paint["--block-free"];
    if (code !== QUARANTINED || share < 1) box();
    const sequence = owner(code);
    const dim = this.lit !== null && sequence !== this.lit;
    context.globalAlpha = (dim ? 0.22 : 1) * (share < 1 ? 0.3 + 0.7 * share : 1);
    if (sequence !== null) {
      context.fillStyle = ofSequence(sequence);
      box();
    } else if (code === CACHED) {
      context.fillStyle = this.paint["--block-cached"];
      box();
    } else if (code === QUARANTINED) {
      const line = Math.max(1, Math.round(size / 7));
      context.strokeStyle = this.paint["--block-quarantined"];
      context.lineWidth = line;
      context.strokeRect(x + line / 2, y + line / 2, size - line, size - line);
    }
    if (shared) {
      context.fillStyle = this.paint["--card"];
      const half = Math.max(1, Math.round(size / 5));
      const middle = Math.floor(size / 2);
      context.beginPath();
      if (size >= 9) context.arc(x + size / 2, y + size / 2, half, 0, 7);
      else context.rect(x + middle - Math.floor(half / 2), y + middle - Math.floor(half / 2), half, half);
      context.fill();
    }
    context.globalAlpha = 1;
  }

  #point(event) {
    const ratio = this.canvas.width / this.canvas.clientWidth;
    const column = Math.floor((event.offsetX * ratio) / this.step);
    const cell = Math.floor((event.offsetY * ratio) / this.step) * this.columns + column;
    if (column >= this.columns || cell < 0 || cell >= this.numCells) {
      this.pointed(null, null);
      return;
    }
    const first = cell * this.perCell, last = Math.min(this.codes.length, first + this.perCell) - 1;
    const codes = Array.from(this.codes.slice(first, last + 1));
    const sequences = [...new Set(codes.map(owner).filter((id) => id !== null))];
    const place = first === last ? `Block ${first}` : `Blocks ${first} to ${last}`;
    this.pointed(sequences.length === 1 ? sequences[0] : null, `${place}: ${told(codes, sequences)}`);
  }
}

/** What some blocks are, in words. */
function told(codes, sequences) {
  const parts = [];
  const owned = codes.filter((code) => code >= FIRST_OWNED);
  if (owned.length) {
    const who = sequences.length === 1 ? `sequence ${sequences[0]}` : `${sequences.length} sequences`;
    const more = owned.some(isShared) ? " and others, shared" : "";
    parts.push(codes.length === 1 ? `${who}${more}` : `${owned.length} of ${who}${more}`);
  }
  for (const [code, name] of [[QUARANTINED, "released, awaiting a step"], [CACHED, "cached"], [FREE, "free"]]) {
    const number = codes.filter((each) => each === code).length;
    if (number) parts.push(codes.length === 1 ? name : `${number} ${name}`);
  }
  return parts.join(", ");
}
