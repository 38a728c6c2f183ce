// Four figures with their recent course: rate, time to first token, time between tokens, hits of the prefix cache.

import { $, duration, element, rate } from "./dom.js";

const [WIDTH, HEIGHT, POINTS] = [120, 28, 120];
const SVG = "http://www.w3.org/2000/svg";
const FIGURES = [
  { name: "rate", text: "tokens/s", spell: rate },
  { name: "ttft", text: "to first token", spell: duration },
  { name: "gap", text: "between tokens", spell: duration },
  { name: "hits", text: "of prompts cached", spell: (value) => `${Math.round(100 * value)} %`, most: 1 },
];

export class Figures {
  constructor() {
    this.views = FIGURES.map((figure) => {
      const number = element("strong", { id: `figure-${figure.name}` }, "–");
      const svg = document.createElementNS(SVG, "svg");
      const line = document.createElementNS(SVG, "polyline");
      svg.setAttribute("viewBox", `0 0 ${WIDTH} ${HEIGHT}`);
      svg.setAttribute("preserveAspectRatio", "none");
      svg.setAttribute("aria-hidden", "true");
      svg.append(line);
      $("figures").append(element("div", { class: "figure" }, number, element("span", { class: "note" }, figure.text), svg));
      return { ...figure, number, line };
    });
  }

  draw(recording) {
    const shown = recording.entries.slice(Math.max(0, recording.cursor - POINTS), recording.cursor);
    for (const { name, number, line, spell, most } of this.views) {
      const values = shown.map(({ figures }) => figures[name]);
      const last = values.at(-1) ?? null;
      number.textContent = last === null ? "–" : spell(last);
      line.setAttribute("points", points(values, most));
    }
  }
}

function points(values, most) {
  const known = values.map((value, place) => [place, value]).filter(([, value]) => value !== null);
  const top = most ?? Math.max(...known.map(([, value]) => value), 1e-9);
  const x = (place) => (WIDTH * (place + POINTS - values.length)) / (POINTS - 1);
  return known.map(([place, value]) => `${x(place).toFixed(1)},${(HEIGHT - 2 - (HEIGHT - 4) * (value / top)).toFixed(1)}`).join(" ");
}
