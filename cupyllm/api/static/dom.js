// Elements without innerHTML: text is always text.

export const $ = (id) => document.getElementById(id);

// element("p", { class: "note", onclick }, "text", child, ...)
export function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else if (key === "hidden" || key === "disabled" || key === "checked" || key === "open") made[key] = value;
    else if (value !== undefined && value !== null) made.setAttribute(key, value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

export function button(text, onclick, attributes = {}) {
  return element("button", { type: "button", class: "quiet", onclick, ...attributes }, text);
}

// A canvas that is as sharp as the screen; returns its context, whose units are CSS pixels.
export function fitCanvas(canvas, width, height) {
  const ratio = window.devicePixelRatio || 1;
  const [wide, high] = [Math.round(width * ratio), Math.round(height * ratio)];
  if (canvas.width !== wide || canvas.height !== high) {
    canvas.width = wide;
    canvas.height = high;
    canvas.style.width = `${width}px`;
    canvas.style.height = `${height}px`;
  }
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  return context;
}

// A colour of the style sheet, for canvases.
export const styleColour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

// Neighbouring ids get colours that are far apart: the golden angle never comes back to a hue.
export function sequenceColour(id) {
  const hue = (id * 137.508 + 175) % 360;
  return `oklch(${styleColour("sequence-lightness")} ${styleColour("sequence-chroma")} ${hue.toFixed(1)})`;
}

export const count = (number, one, many = `${one}s`) => `${number.toLocaleString("en")} ${number === 1 ? one : many}`;

export const rate = (perSecond) => (perSecond < 100 ? perSecond.toPrecision(3) : Math.round(perSecond).toLocaleString("en"));

export function duration(seconds) {
  if (seconds < 0.001) return `${Math.round(seconds * 1e6)} µs`;
  if (seconds < 1) return `${(seconds * 1000).toPrecision(3)} ms`;
  return `${seconds.toFixed(seconds < 10 ? 2 : 1)} s`;
}

// Copy, and say so on the button that was pressed. Pages that come by http from another machine have no clipboard.
export async function copyText(text, said) {
  const before = said.textContent;
  try {
    await navigator.clipboard.writeText(text);
    said.textContent = "Copied";
  } catch {
    said.textContent = copyByHand(text) ? "Copied" : "Cannot copy";
  }
  setTimeout(() => (said.textContent = before), 1500);
}

function copyByHand(text) {
  const area = element("textarea", { class: "hidden" });
  area.value = text;
  document.body.append(area);
  area.select();
  const done = document.execCommand("copy");
  area.remove();
  return done;
}
