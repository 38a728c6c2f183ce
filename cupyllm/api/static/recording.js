// The last steps of the engine, and the state of pages and sequences at one of them. Knows no elements.
//
// A snapshot and the records after it give the state after each step. Every record that is applied leaves behind what
// it overwrote, so that one can go back. `cursor` counts the records that are applied; `following` moves it along.

const STEPS_KEPT = 500;

export class Recording {
  constructor() {
    this.limits = null;
    this.following = true;
    this.entries = []; // { record, cells, figures, undo }
    this.begin({ num_pages: 0, page_size: 0, pages: [], sequences: [], num_waiting: 0 }, null);
  }

  // A stream has begun, or begins anew after falling behind.
  begin(snapshot, limits) {
    this.limits = limits;
    this.numPages = snapshot.num_pages;
    this.pageSize = snapshot.page_size;
    this.pages = new Map(snapshot.pages.map(([page, state, place, holders]) => [page, { state, place, holders }]));
    this.sequences = new Map();
    this.waiting = snapshot.num_waiting;
    this.entries = [];
    this.cursor = 0;
    this.lanes = [];
    this.meter = new Meter();
    for (const facts of snapshot.sequences) {
      const sequence = sequenceOf(facts);
      this.sequences.set(sequence.id, sequence);
      this.meter.meet(sequence);
    }
  }

  get isAtEnd() {
    return this.cursor === this.entries.length;
  }

  // The record at the cursor, undefined before the first.
  get current() {
    return this.entries[this.cursor - 1];
  }

  // Take a record in; returns the pages that changed on the map.
  push(record) {
    this.entries.push({ record, cells: this.#cells(record), figures: this.meter.read(record), undo: null });
    let changed = this.following ? this.seek(this.entries.length) : [];
    if (this.entries.length > STEPS_KEPT) {
      if (this.cursor === 0) changed = this.forward();
      const [{ record: gone }] = this.entries.splice(0, 1);
      for (const [id] of gone.ended) this.sequences.delete(id);
      this.cursor -= 1;
    }
    return changed;
  }

  // One step forward; returns the pages that changed.
  forward() {
    if (this.isAtEnd) return [];
    const entry = this.entries[this.cursor];
    entry.undo = this.#apply(entry.record);
    this.cursor += 1;
    return entry.record.page_changes.map(([page]) => page);
  }

  // One step back; returns the pages that changed.
  back() {
    if (this.cursor === 0) return [];
    this.cursor -= 1;
    const { record, undo } = this.entries[this.cursor];
    for (const [map, key, value] of undo.reverse()) {
      if (value === undefined) map.delete(key);
      else map.set(key, value);
    }
    return record.page_changes.map(([page]) => page);
  }

  // Go to a cursor; returns the pages that changed on the way.
  seek(cursor) {
    const changed = [];
    while (this.cursor < Math.min(cursor, this.entries.length)) changed.push(...this.forward());
    while (this.cursor > Math.max(cursor, 0)) changed.push(...this.back());
    return changed;
  }

  #apply(record) {
    const undo = [];
    const set = (map, key, value) => {
      undo.push([map, key, map.get(key)]);
      map.set(key, value);
    };
    const alter = (id, change) => {
      const sequence = this.sequences.get(id);
      if (sequence) set(this.sequences, id, { ...sequence, ...change(sequence) });
    };
    for (const facts of record.started) set(this.sequences, facts[0], sequenceOf(facts));
    for (const [parent, id] of record.forks) alter(id, () => ({ parent, state: "decode" }));
    for (const [id, start, length] of record.chunks) {
      alter(id, ({ cached }) => ({ state: "prefill", computed: start + length, cached: cached ?? start }));
    }
    for (const id of record.decode_ids) alter(id, () => ({ state: "decode" }));
    for (const id of record.token_ids) alter(id, ({ output }) => ({ output: output + 1 }));
    for (const id of record.preempted_ids) alter(id, ({ preemptions }) => ({ state: "waiting", preemptions: preemptions + 1 }));
    for (const [id, reason] of record.ended) alter(id, () => ({ state: "ended", reason }));
    for (const [page, state, place, holders] of record.page_changes) {
      const before = this.pages.get(page);
      const was = before?.state === "live" ? { place: before.place, id: before.holders[0] } : before?.was;
      set(this.pages, page, { state, place, holders, was: state === "cached" ? was : undefined });
    }
    return undo;
  }

  // What the timeline shows of a step: for each sequence that ran, the lane it stands in from its first step to its end.
  #cells(record) {
    const laneOf = (id) => {
      const known = this.lanes.indexOf(id);
      if (known >= 0) return known;
      const free = this.lanes.indexOf(undefined);
      const lane = free >= 0 ? free : this.lanes.length;
      this.lanes[lane] = id;
      return lane;
    };
    const cells = [
      ...record.decode_ids.map((id) => ({ id, lane: laneOf(id), tokens: 1, kind: "decode" })),
      ...record.chunks.map(([id, , length]) => ({ id, lane: laneOf(id), tokens: length, kind: "prefill" })),
    ];
    for (const [id] of record.ended) {
      const lane = this.lanes.indexOf(id);
      if (lane >= 0) this.lanes[lane] = undefined;
    }
    return cells;
  }
}

const sequenceOf = ([id, prompt, cached, output, queuedAt]) => ({
  id, prompt, cached, output, queuedAt, computed: cached ?? 0, state: output ? "decode" : "waiting", preemptions: 0,
});

// Rates and waiting times, from the records in the order they come.
class Meter {
  #queuedAt = new Map();
  #lastTokenAt = new Map();
  #recent = []; // [end of step, tokens] of the last second
  #prompt = 0;
  #cached = 0;
  #prompts = new Map(); // id -> prompt tokens, until its first chunk
  #ttft = null;
  #gap = null;

  meet({ id, prompt, output, queuedAt }) {
    if (output) return;
    this.#queuedAt.set(id, queuedAt);
    this.#prompts.set(id, prompt);
  }

  read(record) {
    const end = record.start_s + record.seconds;
    for (const facts of record.started) this.meet(sequenceOf(facts));
    for (const [id, start] of record.chunks) {
      if (!this.#prompts.has(id)) continue;
      this.#prompt += this.#prompts.get(id);
      this.#cached += start;
      this.#prompts.delete(id);
    }
    const gaps = [];
    for (const id of record.token_ids) {
      if (this.#queuedAt.has(id)) this.#ttft = end - this.#queuedAt.get(id);
      else if (this.#lastTokenAt.has(id)) gaps.push(end - this.#lastTokenAt.get(id));
      this.#queuedAt.delete(id);
      this.#lastTokenAt.set(id, end);
    }
    if (gaps.length) this.#gap = gaps.reduce((sum, gap) => sum + gap, 0) / gaps.length;
    for (const [id] of record.ended) this.#lastTokenAt.delete(id);
    this.#recent.push([end, record.token_ids.length]);
    while (this.#recent[0][0] < end - 1) this.#recent.shift();
    const [[first]] = this.#recent;
    const tokens = this.#recent.reduce((sum, [, number]) => sum + number, 0);
    const span = Math.max(end - first, record.seconds);
    return {
      rate: this.#recent.length > 1 ? (tokens - this.#recent[0][1]) / span : tokens / span,
      ttft: this.#ttft,
      gap: this.#gap,
      hits: this.#prompt ? this.#cached / this.#prompt : null,
    };
  }
}
