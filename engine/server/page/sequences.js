// The running and waiting sequences, a row each that stays the same element for as long as it lives.

import { element, text } from "./charts.js";
import { ofSequence } from "./colours.js";
import { age, count } from "./format.js";

const MOST_RUNNING = 40, MOST_WAITING = 12;
const PHASES = ["waiting", "preempted", "prefill", "recompute", "decode"];
const HELD = 2; // phases from here on hold blocks

/** A row as the server sends it, see `_row` in live.py. */
function parsed(row) {
  const [id, phase, tenant, seconds, prompt, computed, output, most, blocks, hits, preemptions] = row;
  return { id, phase, tenant, seconds, prompt, computed, output, most, blocks, hits, preemptions };
}

export class Sequences {
  /** `pointed(id or null)` as the pointer moves over rows; `pinned(id or null)` as one is chosen. */
  constructor(body, more, pointed, pinned) {
    this.body = body;
    this.more = more;
    this.rows = new Map();
    this.on = { pointed, pinned };
    this.pin = null;
  }

  /** Show a frame's sequences; those that are too many are counted. */
  show(running, waiting, numRunning, numWaiting) {
    const shown = [...running.slice(0, MOST_RUNNING), ...waiting.slice(0, MOST_WAITING)].map(parsed);
    const alive = new Set(shown.map((sequence) => sequence.id));
    for (const [id, row] of this.rows) {
      if (!alive.has(id)) {
        row.tr.remove();
        this.rows.delete(id);
      }
    }
    shown.forEach((sequence, index) => {
      const row = this.rows.get(sequence.id) ?? this.#made(sequence);
      if (this.body.children[index] !== row.tr) this.body.insertBefore(row.tr, this.body.children[index] ?? null);
      this.#update(row, sequence);
    });
    const hidden = numRunning + numWaiting - shown.length;
    this.more.hidden = hidden <= 0;
    text(this.more, `and ${count(hidden)} more`);
    const isGone = this.pin !== null && ![...running, ...waiting].some(([id]) => id === this.pin);
    if (isGone) this.#pinned(null);
  }

  /** Mark the row of a sequence; null: none. */
  light(id) {
    for (const [each, row] of this.rows) row.tr.classList.toggle("lit", each === id);
  }

  recolour() {
    for (const [id, row] of this.rows) this.#colour(row, id);
  }

  #pinned(id) {
    this.pin = id;
    for (const [each, row] of this.rows) row.name.setAttribute("aria-pressed", String(each === id));
    this.on.pinned(id);
  }

  #made(sequence) {
    const tr = element("tr", "");
    tr.dataset.id = sequence.id;
    const head = element("th", "", tr);
    head.scope = "row";
    const name = element("button", "name", head);
    name.type = "button";
    name.title = "Keep its blocks lit";
    name.setAttribute("aria-pressed", "false");
    const swatch = element("i", "swatch", name);
    name.append(String(sequence.id));
    const row = { tr, name, swatch, holds: null };
    row.phase = element("td", "phase", tr);
    row.prompt = bar(element("td", "progress", tr), "Prompt");
    row.output = bar(element("td", "progress", tr), "Output");
    row.blocks = element("td", "number blocks", tr);
    row.preemptions = element("td", "number preemptions", tr);
    row.age = element("td", "number age", tr);
    row.tenant = element("td", "tenant", tr);
    tr.addEventListener("pointerenter", () => this.on.pointed(sequence.id));
    tr.addEventListener("pointerleave", () => this.on.pointed(null));
    name.addEventListener("click", () => this.#pinned(this.pin === sequence.id ? null : sequence.id));
    this.rows.set(sequence.id, row);
    return row;
  }

  #colour(row, id) {
    const colour = row.holds ? ofSequence(id) : "";
    row.swatch.style.backgroundColor = colour;
    row.output.done.style.backgroundColor = colour;
  }

  #update(row, sequence) {
    const holds = sequence.phase >= HELD;
    if (row.holds !== holds) {
      row.holds = holds;
      row.tr.classList.toggle("holds", holds);
      this.#colour(row, sequence.id);
    }
    row.tr.dataset.phase = PHASES[sequence.phase];
    text(row.phase, PHASES[sequence.phase]);
    const computed = Math.min(sequence.computed, sequence.prompt);
    row.prompt.fill(computed, sequence.prompt, sequence.hits);
    row.output.fill(sequence.output, sequence.most, 0);
    text(row.blocks, count(sequence.blocks));
    text(row.preemptions, sequence.preemptions ? count(sequence.preemptions) : "");
    text(row.age, age(sequence.seconds));
    text(row.tenant, sequence.tenant);
  }
}

/** A slim bar with numbers beside it. */
function bar(cell, name) {
  const track = element("span", "track", cell);
  track.setAttribute("role", "progressbar");
  track.setAttribute("aria-label", name);
  const done = element("span", "done", track);
  const numbers = element("span", "numbers", cell);
  cell.dataset.name = name;
  return {
    done,
    fill(value, most, hits) {
      done.style.width = `${(100 * value) / Math.max(1, most)}%`;
      track.setAttribute("aria-valuenow", value);
      track.setAttribute("aria-valuemax", most);
      text(numbers, `${count(value)} / ${count(most)}`);
      cell.title = hits ? `${count(hits)} found in the prefix cache` : "";
    },
  };
}
