// The live page: takes the server's feed and hands it to the map, the charts and the list.

import { Chart, element, text } from "./charts.js";
import { onScheme } from "./colours.js";
import { age, count, percent, rate, seconds } from "./format.js";
import { BlockMap } from "./map.js";
import { Sequences } from "./sequences.js";
import { Stream } from "./stream.js";

const KEPT_S = 130;
const LONG_STEP_MS = 3500;
const by = (id) => document.getElementById(id);
const part = (index) => (key) => (point) => point[key]?.[index] ?? null;
const [p50, p95] = [part(0), part(1)];
const dash = (value, shown) => (value === null || value === undefined ? "–" : shown(value));

const charts = [
  latency("chart-ttft", "ttft", "no request began lately"),
  latency("chart-itl", "itl", "no token came lately"),
  new Chart(by("chart-tps"), {
    series: [{ of: (p) => p.tps, colour: "--first", fill: true }],
    label: rate,
    big: (p) => dash(p.tps, rate),
    small: () => "all sequences together",
  }),
  new Chart(by("chart-sequences"), {
    series: [
      { of: (p) => p.waiting, colour: "--second" },
      { of: (p) => p.running, colour: "--first", fill: true },
    ],
    most: 4,
    label: count,
    big: (p) => `${count(p.running)} running`,
    small: (p) => `${count(p.waiting)} waiting`,
  }),
  new Chart(by("chart-kv"), {
    series: [
      { of: (p) => p.waste, colour: "--second" },
      { of: (p) => p.used, colour: "--first", fill: true },
    ],
    most: 1,
    limit: 1,
    label: percent,
    big: (p) => percent(p.used),
    small: (p) => (p.waste === null ? "none" : `${percent(p.waste)} of it wasted`),
  }),
  new Chart(by("chart-gap"), {
    series: [{ of: (p) => p.gap, colour: "--first", fill: true }],
    most: 0.1,
    limit: 1,
    label: percent,
    big: (p) => dash(p.gap, percent),
    small: (p) => (p.gap_s === null ? "nothing to do" : `of time at work; ${seconds(p.gap_s)}`),
  }),
];

function latency(id, key, nothing) {
  return new Chart(by(id), {
    series: [
      { of: p95(key), colour: "--second" },
      { of: p50(key), colour: "--first" },
    ],
    label: seconds,
    big: (p) => dash(p50(key)(p), seconds),
    small: (p) => (p[key] ? `p50; p95 ${seconds(p95(key)(p))}` : nothing),
  });
}

// Pointing and pinning: what is pointed at goes before what is pinned.
const state = { points: [], facts: null, since: 0, frameAt: 0, pointed: null, pinned: null };
const hint = by("pointed").textContent;

function light() {
  const id = state.pointed ?? state.pinned;
  map.light(id);
  list.light(id);
}

const map = new BlockMap(
  by("map"),
  (id, words) => {
    state.pointed = id;
    text(by("pointed"), words ?? hint);
    light();
  },
  (perCell) => {
    const size = `${count(state.facts.num_blocks)} of ${count(state.facts.block_size)} tokens`;
    text(by("pool-size"), perCell > 1 ? `${size}, ${perCell} to a cell` : size);
  },
);
const list = new Sequences(
  by("rows"),
  by("more"),
  (id) => {
    state.pointed = id;
    light();
  },
  (id) => {
    state.pinned = id;
    light();
  },
);

onScheme(() => {
  map.draw();
  list.recolour();
  charts.forEach((chart) => chart.draw());
});

const STATES = {
  serving: ["live", "Live"],
  shutting_down: ["draining", "Shutting down: open requests finish, new ones are refused"],
  engine_dead: ["lost", "The engine has stopped"],
};
let countdown = null;

function status(kind, words) {
  document.body.className = kind;
  text(by("status"), words);
}

function connected() {
  clearInterval(countdown);
  text(by("countdown"), "");
  by("retry").hidden = true;
}

// Without the name and password that the address may have: fetch refuses those, and the browser knows them anyway.
const stream = new Stream(new URL("live/events", location.origin + location.pathname), {
  open: connected,
  paused: () => {
    connected();
    status("lost", "Paused while nobody looks");
  },
  lost: (why, wait) => {
    connected();
    status("lost", why);
    by("retry").hidden = false;
    const until = performance.now() + 1000 * wait;
    const tick = () => {
      const left = Math.max(0, Math.ceil((until - performance.now()) / 1000));
      text(by("countdown"), left ? `next try in ${left} s` : "trying");
    };
    tick();
    countdown = setInterval(tick, 500);
  },
  event: (name, data) => {
    if (name === "hello") hello(data);
    else if (name === "frame") frame(data);
    else if (performance.now() - state.frameAt > LONG_STEP_MS) status("live", "Live, in a long step");
  },
});

function hello(facts) {
  state.facts = facts;
  state.since = performance.now();
  state.points = facts.points;
  text(by("model"), facts.model);
  text(by("policy"), `policy ${facts.policy}`);
  document.title = `${facts.model} · PagedServe`;
  map.reset(facts.num_blocks);
  facing(by("limits"), [
    ...facts.parts,
    ["running sequences", count(facts.max_num_seqs)],
    ["tokens in a step", count(facts.max_num_batched_tokens)],
    ["tokens in a sequence", count(facts.max_model_len)],
    ["queued requests", count(facts.max_num_queued_reqs)],
    ["server", facts.version],
  ]);
}

function frame(told) {
  if (told.state in STATES) status(...STATES[told.state]);
  state.frameAt = performance.now();
  text(by("uptime"), `up ${age(state.facts.uptime_s + (performance.now() - state.since) / 1000)}`);
  if (told.blocks.all) map.setAll(told.blocks.all);
  else map.change(told.blocks.changed);
  pool(told.pool);
  state.points.push(told.point);
  while (state.points[0].t < told.point.t - KEPT_S) state.points.shift();
  charts.forEach((chart) => chart.show(state.points));
  const { running, waiting } = told.point;
  list.show(told.running, told.waiting, running, waiting);
  text(by("sequences-size"), `${count(running)} of ${count(state.facts.max_num_seqs)} run, ${count(waiting)} wait`);
  by("nothing").hidden = running + waiting > 0;
  document.querySelector("table").hidden = running + waiting === 0;
  totals(told);
}

function pool(counts) {
  const names = ["owned", "shared", "quarantined", "cached", "free"];
  const numBlocks = state.facts.num_blocks;
  names.forEach((name, i) => {
    const shown = by(name);
    shown.dataset.value = counts[i];
    text(shown, count(counts[i]));
    const piece = by("pool-bar").querySelector(`.${name}`);
    if (piece) piece.style.width = `${(100 * counts[i]) / numBlocks}%`;
  });
  const words = names.map((name, i) => `${count(counts[i])} ${name}`).join(", ");
  by("map").setAttribute("aria-label", `Map of ${count(numBlocks)} KV blocks: ${words}`);
}

function totals({ totals: t, ended, turned_away: turnedAway }) {
  const share = t.queried_tokens ? ` (${percent(t.hit_tokens / t.queried_tokens)} hit)` : "";
  const reasons = Object.entries(ended).map(([reason, number]) => `${count(number)} ${reason}`);
  facing(by("totals"), [
    ["output tokens", count(t.output_tokens)],
    ["prompt tokens", `${count(t.prompt_tokens)}${share}`],
    ["steps", count(t.steps)],
    ["preemptions", count(t.preemptions)],
    ["recomputed tokens", count(t.recomputed_tokens)],
    ...(t.blocks_swapped_out
      ? [["blocks swapped", `${count(t.blocks_swapped_out)} out, ${count(t.blocks_swapped_in)} in`]]
      : []),
    ["discarded tokens", count(t.discarded_tokens)],
    ["requests ended", reasons.join(", ") || "0"],
    ["turned away", count(turnedAway)],
  ]);
}

/** Terms and values side by side; elements are kept from one call to the next. */
function facing(target, pairs) {
  while (target.children.length > pairs.length) target.lastChild.remove();
  pairs.forEach(([term, value], i) => {
    const row = target.children[i] ?? element("div", "", target);
    const dt = row.querySelector("dt") ?? element("dt", "", row);
    const dd = row.querySelector("dd") ?? element("dd", "", row);
    text(dt, term);
    text(dd, value);
  });
}

by("retry").addEventListener("click", () => stream.retry());
stream.retry();
