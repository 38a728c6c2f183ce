// The engine view: reads the stream of steps while it is shown, and draws the step at the cursor.

import { ask, events, ServerError } from "./api.js";
import { $, count, duration, element, sequenceColour } from "./dom.js";
import { Figures } from "./figures.js";
import { PageMap } from "./page_map.js";
import { Recording } from "./recording.js";
import { sendShared } from "./share.js";
import { Timeline } from "./timeline.js";

const RETRY_MS = 2000;
const REPLAY_MS = 140; // for a step
const MOST_ROWS = 40;

const recording = new Recording();
let [pageMap, timeline, figures] = [];
let stream = null; // the AbortController of the stream that is read
let replay = null; // the timer that goes on step by step
let pending = null; // pages to draw with the next frame; "all" after a jump

export function startEngine() {
  pageMap = new PageMap($("pages"), $("tip"));
  timeline = new Timeline($("timeline"), (cursor) => goTo(cursor));
  figures = new Figures();
  $("back").addEventListener("click", stepBack);
  $("forward").addEventListener("click", stepForward);
  $("play").addEventListener("click", pauseOrPlay);
  $("live").addEventListener("click", goLive);
  $("seek").addEventListener("input", () => goTo(Number($("seek").value)));
  $("share").addEventListener("click", watchShare);
  $("timeline").addEventListener("keydown", (event) => {
    if (event.key === "ArrowLeft") stepBack();
    else if (event.key === "ArrowRight") stepForward();
    else return;
    event.preventDefault();
    event.stopPropagation();
  });
  new ResizeObserver(() => drawSoon("all")).observe($("engine"));
}

// Watch while the view can be seen, and only then: a server that nobody watches records nothing.
export function watch(on) {
  if (on && stream === null) read();
  if (!on && stream !== null) {
    stream.abort();
    stream = null;
  }
}

export const redrawEngine = () => drawSoon("all");

async function read() {
  const own = (stream = new AbortController());
  while (stream === own) {
    try {
      const response = await ask("/live/steps", { signal: own.signal });
      say("");
      for await (const event of events(response)) take(event);
      say("The server ended the stream. Trying again.");
    } catch (error) {
      if (own.signal.aborted) return;
      say(error instanceof ServerError ? error.message : "The connection was lost. Trying again.");
      if (error.status === 401) {
        stream = null;
        return;
      }
    }
    await new Promise((resolve) => setTimeout(resolve, RETRY_MS));
  }
}

function take(event) {
  if (event.type === "snapshot") {
    recording.begin(event.snapshot, event.limits);
    setPaused(false);
    pageMap.begin(recording);
    drawSoon("all");
    return;
  }
  let record = {}; // a step says what is not as in the one before it
  const changed = event.steps.flatMap((change) => recording.push((record = { ...record, ...change })));
  pageMap.note(changed);
  drawSoon(changed);
}

function drawSoon(pages) {
  if (pending === null) {
    requestAnimationFrame(() => {
      const drawn = pending;
      pending = null;
      draw(drawn);
    });
  }
  pending = pages === "all" || pending === "all" ? "all" : [...(pending ?? []), ...pages];
}

function draw(pages) {
  if (!$("engine").offsetWidth) return;
  pageMap.draw(pages === "all" ? null : pages);
  timeline.draw(recording);
  figures.draw(recording);
  drawTransport();
  drawNotes();
  drawRows();
}

function drawTransport() {
  $("seek").max = recording.entries.length;
  $("seek").value = recording.cursor;
  const { record } = recording.current ?? {};
  $("seek").setAttribute("aria-valuetext", record ? `step ${record.number}` : "before the first step");
  $("back").disabled = recording.cursor === 0;
  $("forward").disabled = recording.isAtEnd;
  $("play").textContent = !recording.following && replay === null ? "Play" : "Pause";
  $("live").setAttribute("aria-pressed", String(recording.following));
}

function drawNotes() {
  const counts = { live: 0, shared: 0, cached: 0 };
  for (const { state, holders } of recording.pages.values()) {
    if (state !== "free") counts[state] += 1;
    if (holders.length > 1) counts.shared += 1;
  }
  const free = recording.numPages - counts.live - counts.cached;
  const shown = { live: counts.live, shared: counts.shared, cached: counts.cached, free };
  $("page-counts").textContent = Object.entries(shown).map(([state, number]) => `${number.toLocaleString("en")} ${state}`).join(" · ");
  $("step-note").textContent = recording.current ? describe(recording.current.record) : "none yet";
}

// A step in words.
function describe(record) {
  const parts = [`step ${record.number}`, duration(record.seconds)];
  if (record.decode_ids.length) parts.push(count(record.decode_ids.length, "decode row"));
  for (const [id, start, length] of record.chunks.slice(0, 2)) parts.push(`tokens ${start} to ${start + length - 1} of sequence ${id}`);
  if (record.chunks.length > 2) parts.push(`${record.chunks.length - 2} more chunks`);
  if (record.forks.length) parts.push(`${count(record.forks.length, "sequence")} forked from sequence ${record.forks[0][0]}`);
  if (record.page_copies.length) parts.push(`${count(record.page_copies.length, "page")} copied before writing`);
  if (record.preempted_ids.length) parts.push(`sequence ${record.preempted_ids.join(", ")} preempted: no page was left`);
  if (record.evicted_pages.length) parts.push(`${count(record.evicted_pages.length, "page")} evicted from the cache`);
  return parts.join(" · ");
}

function drawRows() {
  const record = recording.current?.record;
  const live = [...recording.sequences.values()].filter(({ state }) => state !== "ended");
  const running = live.filter(({ state }) => state !== "waiting");
  const waiting = record ? record.num_waiting : recording.waiting;
  const { max_decode_batch_size: rows = 0, max_waiting: queue = 0 } = recording.limits ?? {};
  $("queue-note").textContent = `${running.length} of ${rows} rows · ${waiting} of ${queue} waiting`;
  const held = new Map();
  for (const { holders } of recording.pages.values()) for (const id of holders) held.set(id, (held.get(id) ?? 0) + 1);
  $("rows").replaceChildren(...live.slice(0, MOST_ROWS).map((sequence) => rowOf(sequence, held.get(sequence.id) ?? 0)));
  if (!live.length) $("rows").append(element("li", { class: "note" }, "Nothing runs. Ask something, or watch it share."));
}

function rowOf(sequence, pages) {
  const dot = element("i", { class: "swatch" });
  dot.style.background = sequenceColour(sequence.id);
  const done = sequence.state === "prefill" ? sequence.computed / sequence.prompt : 1;
  const words = {
    waiting: sequence.preemptions ? "preempted, waits to be computed again" : "waits",
    prefill: `prompt, ${sequence.computed} of ${sequence.prompt} tokens`,
    decode: `${count(sequence.output, "token")} after ${sequence.prompt}`,
  }[sequence.state];
  const more = [count(pages, "page")];
  if (sequence.cached) more.push(`${sequence.cached} tokens from the cache`);
  if (sequence.parent !== undefined) more.push(`forked from ${sequence.parent}`);
  const bar = element("span", { class: "progress" });
  bar.style.setProperty("--done", `${100 * done}%`);
  bar.style.setProperty("--colour", sequenceColour(sequence.id));
  return element("li", { class: sequence.state }, dot, element("b", {}, String(sequence.id)), element("span", {}, words), bar,
    element("span", { class: "note" }, more.join(" · ")));
}

// Moving in time.

function setPaused(on) {
  recording.following = !on;
  clearInterval(replay);
  replay = null;
}

function goTo(cursor) {
  setPaused(true);
  draw(recording.seek(cursor)); // at once, as what a key does should be
}

export const stepBack = () => goTo(recording.cursor - 1);
export const stepForward = () => goTo(recording.cursor + 1);

export function goLive() {
  setPaused(false);
  draw(recording.seek(recording.entries.length));
}

export function pauseOrPlay() {
  if (recording.following || replay !== null) setPaused(true);
  else if (recording.isAtEnd) setPaused(false);
  else play();
  drawSoon([]);
}

function play() {
  replay = setInterval(() => {
    drawSoon(recording.forward());
    if (!recording.isAtEnd) return;
    setPaused(false);
    say("");
  }, REPLAY_MS);
}

// Watch it share.

async function watchShare() {
  $("share").disabled = true;
  goLive();
  const from = recording.entries.at(-1)?.record ?? null;
  say("Sending one long prompt: first for four answers at once, then by four requests of their own …");
  try {
    await sendShared({ model: $("model").value || undefined, pageSize: recording.pageSize, maxModelLen: recording.limits.max_model_len });
    await new Promise((resolve) => setTimeout(resolve, 400)); // until the last steps are here
    replayFrom(from);
  } catch (error) {
    say(error instanceof ServerError ? error.message : "The engine is not being watched. Try again.");
  } finally {
    $("share").disabled = false;
  }
}

function replayFrom(record) {
  goTo(Math.max(0, recording.entries.findIndex((entry) => entry.record === record) + 1));
  say("Once more, slowly. The prompt is computed once. Its four answers hold the same pages; each copies the last one " +
    "before it writes. Then four requests with this prompt find its pages in the prefix cache.");
  play();
}

function say(text) {
  $("caption").textContent = text;
}
