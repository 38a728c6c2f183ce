// The pages of the KV cache as cells. Long stretches that were never used are folded away.

import { fitCanvas, sequenceColour, styleColour } from "./dom.js";

const SIZES = [20, 17, 14, 12, 10, 8, 7, 6, 5, 4, 3];
const MOST_HEIGHT = 300;
const FOLD = 20; // height of the line that stands for rows that were never used
const SPARE_ROWS = 2;

export class PageMap {
  constructor(canvas, tip) {
    this.canvas = canvas;
    this.tip = tip;
    this.used = new Set(); // pages that were not free at some time
    this.chosen = null;
    this.layout = null;
    canvas.addEventListener("pointermove", (event) => this.#point(event));
    canvas.addEventListener("pointerdown", (event) => this.#point(event));
    // A finger leaves when it is lifted: then what it chose stays until another place is touched.
    canvas.addEventListener("pointerleave", (event) => event.pointerType === "touch" || this.#choose(null));
    document.addEventListener("pointerdown", (event) => event.target === canvas || this.#choose(null));
    canvas.addEventListener("pointercancel", () => this.#choose(null)); // it scrolls
    canvas.addEventListener("blur", () => this.#choose(null));
    canvas.addEventListener("keydown", (event) => this.#move(event));
  }

  begin(recording) {
    this.recording = recording;
    this.used = new Set(recording.pages.keys());
    this.layout = null;
    this.draw();
  }

  // Pages that are or were in use; they are never folded away.
  note(pages) {
    for (const page of pages) this.used.add(page);
  }

  // Draw all cells, or only those of some pages where nothing else has moved.
  draw(pages = null) {
    const { recording } = this;
    if (!recording?.numPages) return;
    const width = this.canvas.parentElement.clientWidth;
    if (!width) return;
    if (pages === null || this.layout?.width !== width || this.#hasNewRows(pages)) {
      this.layout = this.#layOut(width);
      pages = null;
    }
    this.colours = { free: styleColour("free"), cached: styleColour("cached"), line: styleColour("line"), text: styleColour("muted"),
      surface: styleColour("surface"), ink: styleColour("text") };
    this.context = fitCanvas(this.canvas, width, this.layout.height);
    if (pages === null) {
      this.context.clearRect(0, 0, width, this.layout.height);
      this.layout.folds.forEach((fold) => this.#drawFold(fold));
      for (const [row] of this.layout.tops) {
        const first = row * this.layout.columns;
        for (let page = first; page < Math.min(first + this.layout.columns, recording.numPages); page += 1) this.#drawCell(page);
      }
    } else pages.forEach((page) => this.#drawCell(page));
    if (this.chosen !== null) this.#outline(this.chosen);
  }

  #hasNewRows(pages) {
    return pages.some((page) => !this.layout.tops.has(Math.floor(page / this.layout.columns)));
  }

  // The largest cells that fit; they never grow again while the page is open, so that nothing jumps.
  #layOut(width) {
    const largest = this.layout?.width === width ? this.layout.size : SIZES[0];
    let layout;
    for (const size of SIZES.filter((one) => one <= largest)) {
      layout = this.#rows(width, size);
      if (layout.height <= MOST_HEIGHT) break;
    }
    return layout;
  }

  #rows(width, size) {
    const columns = Math.max(1, Math.floor(width / size));
    const total = Math.ceil(this.recording.numPages / columns);
    const shown = new Set();
    if (total * size <= MOST_HEIGHT) for (let row = 0; row < total; row += 1) shown.add(row);
    const around = (row) => {
      for (let near = row - 1; near <= row + SPARE_ROWS; near += 1) if (near >= 0 && near < total) shown.add(near);
    };
    around(0);
    for (const page of this.used) around(Math.floor(page / columns));
    const tops = new Map();
    const folds = [];
    let [top, next] = [0, 0];
    for (const row of [...shown, total].sort((one, other) => one - other)) {
      if (row > next) {
        folds.push({ top, pages: (Math.min(row * columns, this.recording.numPages) - next * columns) });
        top += FOLD;
      }
      if (row < total) {
        tops.set(row, top);
        top += size;
      }
      next = row + 1;
    }
    return { width, size, columns, tops, folds, height: Math.max(top, size) };
  }

  #drawFold({ top, pages }) {
    const { context, colours, layout } = this;
    context.fillStyle = colours.text;
    context.font = "11px system-ui, sans-serif";
    context.textAlign = "center";
    context.textBaseline = "middle";
    const text = `${pages.toLocaleString("en")} more pages, never used`;
    context.fillText(text, layout.width / 2, top + FOLD / 2);
    const half = context.measureText(text).width / 2 + 10;
    context.fillStyle = colours.line;
    context.fillRect(0, top + FOLD / 2, layout.width / 2 - half, 1);
    context.fillRect(layout.width / 2 + half, top + FOLD / 2, layout.width / 2 - half, 1);
  }

  #box(page) {
    const { columns, size, tops } = this.layout;
    const top = tops.get(Math.floor(page / columns));
    return top === undefined ? null : [(page % columns) * size, top, size];
  }

  #drawCell(page) {
    const box = this.#box(page);
    if (!box) return;
    const { context, colours } = this;
    const [x, y, size] = box;
    const gap = size > 5 ? 2 : 1;
    const inner = size - gap;
    const use = this.recording.pages.get(page);
    context.clearRect(x, y, size, size);
    if (!use || use.state === "free") {
      context.fillStyle = colours.free;
      context.fillRect(x, y, inner, inner);
    } else if (use.state === "cached") {
      context.fillStyle = colours.cached;
      context.fillRect(x, y, inner, inner);
      if (use.was && size > 6) {
        context.fillStyle = sequenceColour(use.was.id);
        context.fillRect(x, y + inner - 2, inner, 2);
      }
    } else this.#drawLive(use, x, y, inner);
  }

  // A page of several sequences is striped in their colours and framed.
  #drawLive({ holders }, x, y, inner) {
    const { context, colours } = this;
    const stripes = holders.slice(0, 6);
    const width = inner / stripes.length;
    stripes.forEach((id, place) => {
      context.fillStyle = sequenceColour(id);
      context.fillRect(x + place * width, y, width, inner);
    });
    if (holders.length > 1 && inner > 4) {
      context.strokeStyle = colours.ink;
      context.lineWidth = 1;
      context.strokeRect(x + 0.5, y + 0.5, inner - 1, inner - 1);
    }
  }

  #outline(page) {
    const box = this.#box(page);
    if (!box) return;
    const [x, y, size] = box;
    this.context.strokeStyle = this.colours.ink;
    this.context.lineWidth = 2;
    this.context.strokeRect(x + 1, y + 1, size - 3, size - 3);
  }

  #point(event) {
    const { columns, size, tops } = this.layout ?? {};
    if (!columns) return;
    const column = Math.floor(event.offsetX / size);
    const row = [...tops].find(([, top]) => event.offsetY >= top && event.offsetY < top + size)?.[0];
    const page = row === undefined || column >= columns ? null : row * columns + column;
    this.#choose(page !== null && page < this.recording.numPages ? page : null);
  }

  #move(event) {
    const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: this.layout?.columns, ArrowUp: -this.layout?.columns }[event.key];
    if (step === undefined || !this.layout) return;
    event.preventDefault();
    event.stopPropagation();
    const next = this.chosen === null ? 0 : this.chosen + step;
    if (next >= 0 && next < this.recording.numPages && this.#box(next)) this.#choose(next);
  }

  #choose(page) {
    if (page === this.chosen) return;
    this.chosen = page;
    this.draw();
    if (page === null) {
      this.tip.hidden = true;
      return;
    }
    const text = this.describe(page);
    this.canvas.setAttribute("aria-label", text);
    const [x, y, size] = this.#box(page);
    const at = this.canvas.getBoundingClientRect();
    this.tip.textContent = text;
    this.tip.hidden = false;
    const left = Math.min(at.left + x, document.documentElement.clientWidth - this.tip.offsetWidth - 8);
    this.tip.style.left = `${Math.max(8, left)}px`;
    this.tip.style.top = `${at.top + y + size + 6}px`;
  }

  describe(page) {
    const use = this.recording.pages.get(page);
    const positions = (place) => `positions ${place * this.recording.pageSize} to ${(place + 1) * this.recording.pageSize - 1}`;
    if (!use || use.state === "free") return `Page ${page}: free`;
    if (use.state === "cached") {
      return `Page ${page}: cached, kept for a prompt that begins alike${use.was ? `\n${positions(use.was.place)} of sequence ${use.was.id}, which has ended` : ""}`;
    }
    const many = use.holders.length > 1;
    return `Page ${page}: live${many ? ", shared" : ""}\n${positions(use.place)} of sequence${many ? "s" : ""} ${use.holders.join(", ")}\nreference count ${use.holders.length}`;
  }
}
