// The sampling settings below a chat. An empty field asks for nothing: then the model's own default counts.

import { $, element } from "./dom.js";
import { saveSettings, settings } from "./store.js";

const FIELDS = [
  { name: "temperature", text: "Temperature", min: 0, max: 2, step: 0.1, hint: "0 is always the likeliest" },
  { name: "top_p", text: "Top p", min: 0.01, max: 1, step: 0.01, hint: "the likeliest that reach this sum" },
  { name: "top_k", text: "Top k", min: 0, max: 1000, step: 1, hint: "only so many likeliest; 0 is off" },
  { name: "min_p", text: "Min p", min: 0, max: 1, step: 0.01, hint: "of the likeliest one's probability" },
  { name: "repetition_penalty", text: "Repetition penalty", min: 0.5, max: 2, step: 0.05, hint: "1 is off" },
  { name: "max_tokens", text: "Most tokens", min: 1, max: 1000000, step: 1, hint: "of an answer" },
  { name: "seed", text: "Seed", min: 0, max: 9007199254740991, step: 1, hint: "the same gives the same answer" },
];

export function showSettings() {
  const values = settings();
  for (const { name, text, hint, ...limits } of FIELDS) {
    const input = element("input", { type: "number", id: `set-${name}`, placeholder: "auto", ...limits, value: values[name] ?? null });
    input.addEventListener("change", () => save(name, input.value === "" ? undefined : Number(input.value)));
    $("fields").append(element("label", { title: hint }, text, input));
  }
  const box = element("input", { type: "checkbox", id: "set-logprobs", checked: values.logprobs ?? true });
  box.addEventListener("change", () => save("logprobs", box.checked));
  $("fields").append(element("label", { class: "check", title: "for the view of tokens" }, box, "Keep what else was likely"));
}

// The fields of a request.
export function samplingFields() {
  const values = settings();
  const fields = Object.fromEntries(FIELDS.filter(({ name }) => values[name] !== undefined).map(({ name }) => [name, values[name]]));
  return (values.logprobs ?? true) ? { ...fields, logprobs: true, top_logprobs: 8 } : fields;
}

function save(name, value) {
  saveSettings({ ...settings(), [name]: value });
}
