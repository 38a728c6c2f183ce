// Markdown as DOM nodes, never as HTML text: whatever a model writes can only become text, and a few plain elements.

import { button, copyText, element } from "./dom.js";

const FENCE = /^ {0,3}(```+|~~~+)\s*([\w+#.-]*)/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])\s+(.*)$/;
const RULE = /^ {0,3}([-*_])( *\1){2,} *$/;
const TABLE_LINE = /^ *\|?( *:?-+:? *\|)+ *:?-* *:? *$/;
const MOST_DEPTH = 20; // of quotes and lists in one another; what is deeper is text

export function renderMarkdown(text) {
  const fragment = document.createDocumentFragment();
  fragment.append(...blocks(text.replaceAll("\r\n", "\n").split("\n"), 0));
  return fragment;
}

function blocks(lines, depth) {
  if (depth > MOST_DEPTH) return [element("p", {}, lines.join("\n"))];
  const made = [];
  let place = 0;
  while (place < lines.length) {
    if (!lines[place].trim()) {
      place += 1;
      continue;
    }
    const [node, next] = block(lines, place, depth);
    made.push(node);
    place = next;
  }
  return made;
}

// The block that begins at a line, and the line after it.
function block(lines, start, depth) {
  const line = lines[start];
  const fence = line.match(FENCE);
  if (fence) return codeBlock(lines, start, fence);
  const heading = line.match(/^ {0,3}(#{1,6})\s+(.*?)#*$/);
  if (heading) return [element(`h${Math.min(heading[1].length + 2, 6)}`, {}, ...inline(heading[2])), start + 1];
  if (RULE.test(line)) return [element("hr"), start + 1];
  if (/^ {0,3}>/.test(line)) {
    const end = runEnd(lines, start, (text) => /^ {0,3}>/.test(text));
    return [element("blockquote", {}, ...blocks(lines.slice(start, end).map((text) => text.replace(/^ {0,3}> ?/, "")), depth + 1)), end];
  }
  if (ITEM.test(line)) return list(lines, start, depth);
  if (line.includes("|") && TABLE_LINE.test(lines[start + 1] ?? "")) return table(lines, start);
  let end = start + 1;
  while (end < lines.length && lines[end].trim() && !beginsBlock(lines[end])) end += 1;
  return [element("p", {}, ...inline(lines.slice(start, end).join("\n"))), end];
}

const beginsBlock = (line) => FENCE.test(line) || ITEM.test(line) || RULE.test(line) || /^ {0,3}(#{1,6}\s|>)/.test(line);

function runEnd(lines, start, holds) {
  let end = start;
  while (end < lines.length && holds(lines[end])) end += 1;
  return end;
}

function codeBlock(lines, start, [, mark, language]) {
  const end = runEnd(lines, start + 1, (text) => !text.trimStart().startsWith(mark));
  const code = lines.slice(start + 1, end).join("\n");
  const copy = button("Copy", () => copyText(code, copy));
  const head = element("div", { class: "code-head" }, element("span", {}, language || "code"), copy);
  return [element("div", { class: "code" }, head, element("pre", { tabindex: "0" }, element("code", {}, code))), end + 1];
}

function list(lines, start, depth) {
  const [, indent, mark] = lines[start].match(ITEM);
  const items = [];
  let place = start;
  while (place < lines.length) {
    const found = lines[place].match(ITEM);
    if (!found || found[1].length > indent.length + 1 || /\d/.test(found[2]) !== /\d/.test(mark)) break;
    const content = [found[3]];
    const inner = found[1].length + found[2].length + 1;
    place += 1;
    while (place < lines.length) {
      const next = lines[place];
      const deeper = next.match(/^ */)[0].length > indent.length;
      const goesOn = next.trim() ? deeper || !beginsBlock(next) : (lines[place + 1] ?? "").startsWith(" ".repeat(indent.length + 2));
      if (!goesOn || (!deeper && next.trim() && content.at(-1) === "")) break;
      content.push(next.slice(Math.min(inner, next.match(/^ */)[0].length)));
      place += 1;
    }
    const made = blocks(content, depth + 1);
    items.push(element("li", {}, ...made.flatMap((node, k) => (k === 0 && node.nodeName === "P" ? [...node.childNodes] : [node]))));
    if (!(lines[place] ?? "").trim() && ITEM.test(lines[place + 1] ?? "")) place += 1;
  }
  const ordered = /\d/.test(mark);
  return [element(ordered ? "ol" : "ul", { start: ordered ? parseInt(mark, 10) : null }, ...items), place];
}

function table(lines, start) {
  const end = runEnd(lines, start + 2, (text) => text.includes("|"));
  const row = (text, cell) =>
    element("tr", {}, ...text.trim().replace(/^\||\|$/g, "").split("|").map((part) => element(cell, {}, ...inline(part.trim()))));
  const body = lines.slice(start + 2, end).map((text) => row(text, "td"));
  return [
    element("div", { class: "table" }, element("table", {}, element("thead", {}, row(lines[start], "th")), element("tbody", {}, ...body))),
    end,
  ];
}

const INLINE = [
  [/^(`+)([\s\S]*?[^`])\1(?!`)/, (found) => element("code", {}, found[2])],
  [/^\*\*(?=\S)([\s\S]*?\S)\*\*/, (found) => element("strong", {}, ...inline(found[1]))],
  [/^__(?=\S)([\s\S]*?\S)__(?!\w)/, (found) => element("strong", {}, ...inline(found[1]))],
  [/^~~(?=\S)([\s\S]*?\S)~~/, (found) => element("del", {}, ...inline(found[1]))],
  [/^\*(?=[^\s*])([\s\S]*?[^\s*])\*(?!\*)/, (found) => element("em", {}, ...inline(found[1]))],
  [/^_(?=[^\s_])([\s\S]*?[^\s_])_(?!\w)/, (found) => element("em", {}, ...inline(found[1]))],
  [/^!?\[([^\]\n]*)\]\(<?([^()\s<>]*)>?(?: "[^"]*")?\)/, (found) => link(found[2], inline(found[1]))],
  [/^<(https?:\/\/[^\s<>]+)>/, (found) => link(found[1], [found[1]])],
  [/^https?:\/\/[^\s<>"')\]]*[^\s<>"')\].,;:!?]/, (found) => link(found[0], [found[0]])],
  [/^\\([!-/:-@[-`{-~])/, (found) => found[1]],
  [/^ {2,}\n/, () => element("br")],
];

// Nodes for the text of one block. Marks that are not closed stay as they are.
function inline(text) {
  const nodes = [];
  let plain = "";
  let rest = text;
  while (rest) {
    const afterWord = /\w$/.test(plain);
    const rule = afterWord && /^(_|h)/.test(rest) ? undefined : INLINE.find(([pattern]) => pattern.test(rest));
    if (rule === undefined) {
      const next = rest.slice(1).search(/[`*_~![<\\h]| {2,}\n/);
      const length = next < 0 ? rest.length : next + 1;
      plain += rest.slice(0, length);
      rest = rest.slice(length);
      continue;
    }
    const found = rest.match(rule[0]);
    nodes.push(plain, rule[1](found));
    plain = "";
    rest = rest.slice(found[0].length);
  }
  return [...nodes, plain].filter((node) => node !== "");
}

// Only web addresses become links, and following one tells its owner nothing about this page.
function link(address, children) {
  if (!/^https?:\/\//i.test(address)) return element("span", {}, ...children);
  return element("a", { href: address, target: "_blank", rel: "noopener noreferrer" }, ...children);
}
