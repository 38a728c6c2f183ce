// The tokens of an answer, shaded by how likely each was, and what else could have stood in the place of one.

import { element } from "./dom.js";

const percent = (logprob) => 100 * Math.exp(logprob);
const spell = (share) => (share >= 99.95 ? "100 %" : share >= 0.1 ? `${share.toFixed(1)} %` : share > 0 ? "< 0.1 %" : "0 %");

// `entries` are those of logprobs.content in a chat's answer.
export function renderTokens(entries) {
  const box = element("div", { class: "tokens" });
  const text = element("p", {
    class: "token-text", role: "group", "aria-label": "Tokens; press one to see what else was likely",
  });
  entries.forEach((entry, place) => {
    const token = element("button", { type: "button", class: "token", tabindex: place ? "-1" : "0" }, visible(entry.token));
    token.style.setProperty("--doubt", (1 - Math.exp(entry.logprob)).toFixed(3));
    token.setAttribute("aria-label", `${entry.token.trim() || "space"}, ${spell(percent(entry.logprob))}`);
    token.addEventListener("click", () => choose(box, text, token, entry, place));
    text.append(token, entry.token.includes("\n") ? element("br") : "\u200b");
  });
  text.addEventListener("keydown", (event) => move(event, text));
  box.append(text, element("p", { class: "note hint" }, "Press a token to see what else was likely. The darker, the less likely it was."));
  return box;
}

function choose(box, text, token, entry, place) {
  const wasOpen = token.getAttribute("aria-expanded") === "true";
  box.querySelector(".alternatives")?.remove();
  for (const other of text.querySelectorAll("[aria-expanded]")) other.removeAttribute("aria-expanded");
  if (wasOpen) return;
  token.setAttribute("aria-expanded", "true");
  const panel = alternatives(entry, place);
  box.append(panel);
  const left = Math.min(token.offsetLeft, box.clientWidth - panel.offsetWidth);
  panel.style.left = `${Math.max(0, left)}px`;
  panel.style.top = `${token.offsetTop + token.offsetHeight + 6}px`;
  box.style.minHeight = `${token.offsetTop + token.offsetHeight + panel.offsetHeight + 12}px`;
  panel.scrollIntoView({ block: "nearest" });
}

function alternatives(entry, place) {
  const shown = [...entry.top_logprobs];
  if (!shown.some((other) => same(other, entry))) shown.push(entry);
  shown.sort((one, other) => other.logprob - one.logprob);
  const rest = 100 - shown.reduce((sum, other) => sum + percent(other.logprob), 0);
  const rows = shown.map((other) => row(visible(other.token), percent(other.logprob), same(other, entry) ? "chosen" : ""));
  if (rest > 0.05) rows.push(row("all others", rest, "rest"));
  return element("div", { class: "alternatives", role: "status" },
    element("p", { class: "note" }, `Token ${place + 1}: the model's own probabilities`), element("ul", {}, ...rows));
}

function row(text, share, kind) {
  const bar = element("i", { class: "share" });
  bar.style.setProperty("--share", `${share}%`);
  return element("li", { class: kind }, element("span", { class: "word" }, text), bar, element("span", { class: "number" }, spell(share)));
}

const same = (one, other) => one.token === other.token && String(one.bytes) === String(other.bytes);
const visible = (token) => token.replaceAll("\n", "↵").replaceAll("\t", "⇥") || "∅";

function move(event, text) {
  const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  const tokens = [...text.querySelectorAll(".token")];
  const next = tokens[tokens.indexOf(document.activeElement) + step];
  if (!step || !next) return;
  event.preventDefault();
  event.stopPropagation();
  document.activeElement.tabIndex = -1;
  next.tabIndex = 0;
  next.focus();
}
