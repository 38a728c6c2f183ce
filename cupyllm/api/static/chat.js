// The chat: sends the conversation, shows the answer as it comes, stops it, asks again, and keeps the history.

import { ask, events, ServerError } from "./api.js";
import { $, button, count, duration, element, rate } from "./dom.js";
import { MessageView } from "./message_view.js";
import { samplingFields } from "./settings.js";
import { conversations, forget, forgetAll, newConversation, saveConversation, settings, saveSettings } from "./store.js";

let conversation = newConversation(settings().system ?? "");
let running = null; // the AbortController of the answer that is coming

export function startChat() {
  $("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    send();
  });
  $("prompt").addEventListener("keydown", (event) => {
    if (event.isComposing || event.shiftKey) return;
    if (event.key === "Enter") send();
    else if (event.key === "ArrowUp" && !$("prompt").value) editLast();
    else return;
    event.preventDefault();
  });
  $("prompt").addEventListener("input", fitPrompt);
  $("stop").addEventListener("click", stopAnswer);
  $("new-chat").addEventListener("click", newChat);
  $("system").addEventListener("change", () => {
    conversation.system = $("system").value;
    saveSettings({ ...settings(), system: conversation.system });
  });
  $("open-history").addEventListener("click", openHistory);
  $("close-history").addEventListener("click", () => $("history-dialog").close());
  $("clear-history").addEventListener("click", () => {
    forgetAll();
    listHistory();
  });
  show(conversations()[0] ?? conversation);
}

export async function listModels() {
  const { data } = await (await ask("/v1/models")).json();
  $("model").replaceChildren(...data.map(({ id }) => element("option", { value: id }, id)));
}

export function stopAnswer() {
  running?.abort();
}

export function newChat() {
  stopAnswer();
  show(newConversation(settings().system ?? ""));
  $("prompt").focus();
}

export function answerAgain() {
  if (running || conversation.messages.at(-1)?.role !== "assistant") return;
  cutFrom(conversation.messages.length - 1);
  answer();
}

// After a failure; what there is of an answer that broke off is dropped.
function tryAgain() {
  if (conversation.messages.at(-1)?.role === "assistant") answerAgain();
  else answer();
}

export function openHistory() {
  listHistory();
  $("history-dialog").showModal();
}

function listHistory() {
  const items = conversations().map((one) => {
    const open = button(one.title, () => {
      stopAnswer();
      show(one);
      $("history-dialog").close();
    }, { class: "open", "aria-current": one.id === conversation.id ? "true" : null });
    const drop = button("Forget", () => {
      forget(one.id);
      if (one.id === conversation.id) newChat();
      listHistory();
    }, { "aria-label": `Forget ${one.title}` });
    return element("li", {}, open, element("span", { class: "note" }, new Date(one.changed).toLocaleDateString()), drop);
  });
  $("history").replaceChildren(...(items.length ? items : [element("li", { class: "note" }, "Nothing yet.")]));
}

function show(chosen) {
  conversation = chosen;
  $("system").value = conversation.system;
  $("title").textContent = conversation.title;
  $("messages").replaceChildren(...conversation.messages.map(boxOf));
  if (!conversation.messages.length) $("messages").append(welcome());
  markLast();
  scrollToEnd(true);
}

function welcome() {
  const examples = ["What is paged attention?", "How does continuous batching work?", "What is a page table?"];
  return element("div", { class: "welcome" },
    element("p", {}, "Ask the model something, and watch the engine while it answers."),
    ...examples.map((text) => button(text, () => {
      $("prompt").value = text;
      send();
    }, { class: "example" })));
}

function send() {
  const text = $("prompt").value.trim();
  if (!text || running) return;
  $("prompt").value = "";
  fitPrompt();
  const { messages } = conversation;
  if (messages.at(-1)?.role === "user") cutFrom(messages.length - 1); // it was never answered
  say(text);
}

// Another question at the end of the conversation.
function say(text) {
  $("messages").querySelector(".welcome")?.remove();
  const message = { role: "user", content: text };
  conversation.messages.push(message);
  $("messages").append(boxOf(message));
  answer();
}

// Another text for a question that was asked: what followed it is dropped.
function askInstead(message, text) {
  const place = conversation.messages.indexOf(message);
  if (running || place < 0) return;
  cutFrom(place);
  say(text);
  $("prompt").focus();
}

const editLast = () => [...$("messages").querySelectorAll(".message.user .edit")].at(-1)?.click();

// Drop the messages from a place in the conversation on.
function cutFrom(place) {
  conversation.messages.splice(place);
  [...$("messages").querySelectorAll(".message")].slice(place).forEach((box) => box.remove());
}

const viewOf = (message) => new MessageView(message, { again: answerAgain, askInstead, scroll: scrollToEnd });
const boxOf = (message) => viewOf(message).box;

async function answer() {
  const controller = (running = new AbortController());
  const own = conversation;
  const message = { role: "assistant", content: "", reasoning: "" };
  const view = viewOf(message);
  $("messages").querySelectorAll(".failure").forEach((failure) => failure.remove());
  $("messages").append(view.box);
  setRunning(true);
  scrollToEnd(true);
  const sentAt = performance.now();
  const figures = { sentAt, firstAt: null, lastAt: sentAt, tokens: 0, usage: null, timings: null };
  let failure = null;
  try {
    const response = await ask("/v1/chat/completions", { body: requestBody(own), signal: controller.signal });
    for await (const event of events(response)) take(event, message, view, figures);
  } catch (error) {
    if (!controller.signal.aborted) failure = error instanceof ServerError ? error.message : "The connection was lost.";
    message.finish ??= controller.signal.aborted ? "stopped" : "failed";
  }
  message.note = noteOf(message, figures);
  view.finish();
  if (message.content || message.reasoning) own.messages.push(message);
  else if (failure || message.finish === "stopped") view.box.remove();
  if (failure && own === conversation) {
    $("messages").append(element("p", { class: "failure", role: "alert" }, failure, button("Try again", tryAgain)));
  }
  saveConversation(own);
  running = null;
  setRunning(false);
  if (own !== conversation) return;
  $("title").textContent = own.title;
  $("announce").textContent = failure ?? `Answer complete. ${message.note}`;
  markLast();
  scrollToEnd();
}

function requestBody(own) {
  const system = own.system.trim() ? [{ role: "system", content: own.system }] : [];
  const messages = own.messages.map(({ role, content }) => ({ role, content }));
  const model = $("model").value || undefined;
  return { model, messages: [...system, ...messages], stream: true, stream_options: { include_usage: true }, return_timings: true, ...samplingFields() };
}

function take(event, message, view, figures) {
  if (event.usage) Object.assign(figures, { usage: event.usage, timings: event.timings });
  const [choice] = event.choices;
  if (!choice) return;
  const { content, reasoning_content: reasoning } = choice.delta;
  if (content || reasoning || choice.logprobs) {
    figures.lastAt = performance.now();
    figures.firstAt ??= figures.lastAt;
    figures.tokens += choice.logprobs ? choice.logprobs.content.length : 1;
  }
  if (choice.logprobs) view.entries.push(...choice.logprobs.content);
  message.content += content ?? "";
  message.reasoning += reasoning ?? "";
  if (choice.finish_reason) message.finish = choice.finish_reason;
  message.note = noteOf(message, figures);
  view.refresh();
}

// "128 tokens · 43.1 tokens/s · first after 120 ms"
function noteOf(message, { sentAt, firstAt, lastAt, tokens, usage, timings }) {
  if (firstAt === null) return "";
  const made = usage?.completion_tokens ?? tokens;
  const seconds = (timings?.decode_ms ?? lastAt - firstAt) / 1000;
  const parts = [count(made, "token")];
  if (made > 1 && seconds > 0) parts.push(`${rate((made - 1) / seconds)} tokens/s`);
  parts.push(`first after ${duration((firstAt - sentAt) / 1000)}`);
  const cached = usage?.prompt_tokens_details?.cached_tokens;
  if (cached) parts.push(`${cached} of ${usage.prompt_tokens} prompt tokens from the cache`);
  if (message.finish === "length") parts.push("cut at the most tokens");
  if (message.finish === "stopped") parts.push("stopped");
  return parts.join(" · ");
}

function setRunning(on) {
  $("send").hidden = on;
  $("stop").hidden = !on;
  $("messages").setAttribute("aria-busy", String(on));
}

function markLast() {
  $("messages").querySelectorAll(".last").forEach((box) => box.classList.remove("last"));
  $("messages").lastElementChild?.classList.add("last");
}

function fitPrompt() {
  const prompt = $("prompt");
  prompt.style.height = "auto";
  prompt.style.height = `${Math.min(prompt.scrollHeight, 200)}px`;
}

// Follow the answer, unless the reader has scrolled up.
function scrollToEnd(always = false) {
  const box = $("messages");
  if (always || box.scrollHeight - box.scrollTop - box.clientHeight < 120) box.scrollTop = box.scrollHeight;
}
