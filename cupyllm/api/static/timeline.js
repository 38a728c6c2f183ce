// The last steps as columns: who ran, a chunk of a prompt or one token, and below it what happened to pages.

import { fitCanvas, sequenceColour, styleColour } from "./dom.js";

const COLUMN = 9;
const MARKS = 14; // height of the line of marks
const BARS = 34; // height of the bars of tokens
const FEWEST_LANES = 6;
const MOST_LANES = 64;

export class Timeline {
  constructor(canvas, onchoose) {
    this.canvas = canvas;
    canvas.addEventListener("click", (event) => {
      const cursor = this.first + Math.floor(event.offsetX / COLUMN) + 1;
      if (cursor <= (this.recording?.entries.length ?? 0)) onchoose(cursor);
    });
  }

  draw(recording) {
    this.recording = recording;
    const width = this.canvas.parentElement.clientWidth - this.#padding();
    if (width <= 0) return;
    const columns = Math.floor(width / COLUMN);
    const { entries, cursor } = recording;
    const last = recording.following ? entries.length : Math.min(entries.length, Math.max(cursor + Math.floor(columns / 3), columns));
    this.first = Math.max(0, last - columns);
    const shown = entries.slice(this.first, last);
    const lanes = Math.min(MOST_LANES, Math.max(FEWEST_LANES, ...shown.flatMap(({ cells }) => cells.map(({ lane }) => lane + 1))));
    const lane = lanes > 24 ? 6 : lanes > 12 ? 9 : 13;
    const height = lanes * lane + MARKS + BARS;
    const context = fitCanvas(this.canvas, width, height);
    const colours = Object.fromEntries(["line", "muted", "text", "copied", "preempted", "evicted", "selected", "accent"].map((name) => [name, styleColour(name)]));
    context.clearRect(0, 0, width, height);
    context.fillStyle = colours.line;
    for (let row = 1; row <= lanes; row += 1) context.fillRect(0, row * lane - 1, width, 1);
    const mostTokens = Math.max(1, ...shown.map(({ cells }) => cells.reduce((sum, cell) => sum + cell.tokens, 0)));
    shown.forEach((entry, place) => {
      const column = { x: place * COLUMN, lane, lanes, height, mostTokens };
      if (!recording.following && this.first + place + 1 === cursor) {
        context.fillStyle = colours.selected;
        context.fillRect(column.x - 1, 0, COLUMN, height);
      }
      drawCells(context, entry, column);
      drawMarks(context, entry.record, column, colours);
      drawBar(context, entry, column, colours);
    });
  }

  #padding() {
    const style = getComputedStyle(this.canvas.parentElement);
    return parseFloat(style.paddingLeft) + parseFloat(style.paddingRight);
  }
}

function drawCells(context, { cells }, { x, lane, lanes }) {
  for (const cell of cells) {
    if (cell.lane >= lanes) continue;
    const y = cell.lane * lane + 1;
    context.fillStyle = sequenceColour(cell.id);
    if (cell.kind === "prefill") context.fillRect(x, y, COLUMN - 1, lane - 3);
    else {
      const size = Math.max(3, Math.round(lane * 0.4));
      context.fillRect(x + (COLUMN - 1 - size) / 2, y + (lane - 3 - size) / 2, size, size);
    }
  }
}

function drawMarks(context, record, { x, lane, lanes }, colours) {
  const y = lanes * lane + MARKS / 2;
  const middle = x + (COLUMN - 1) / 2;
  context.beginPath();
  if (record.preempted_ids.length) {
    context.fillStyle = colours.preempted;
    context.moveTo(x, y - 3.5);
    context.lineTo(x + COLUMN - 1, y - 3.5);
    context.lineTo(middle, y + 4);
  } else if (record.page_copies.length) {
    context.fillStyle = colours.copied;
    context.moveTo(middle, y - 4.5);
    context.lineTo(middle + 4, y);
    context.lineTo(middle, y + 4.5);
    context.lineTo(middle - 4, y);
  } else if (record.evicted_pages.length) {
    context.fillStyle = colours.evicted;
    context.arc(middle, y, 3, 0, 7);
  }
  context.fill();
}

// Tokens of the step; the scale is a logarithm, since a chunk of a prompt is hundreds and a decode row is one.
function drawBar(context, { cells }, { x, height, mostTokens }, colours) {
  const tokens = cells.reduce((sum, cell) => sum + cell.tokens, 0);
  if (!tokens) return;
  const tall = Math.max(2, ((BARS - 4) * Math.log2(1 + tokens)) / Math.log2(1 + mostTokens));
  context.fillStyle = colours.muted;
  context.globalAlpha = 0.45;
  context.fillRect(x, height - tall, COLUMN - 2, tall);
  context.globalAlpha = 1;
}
