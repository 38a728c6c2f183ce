// One message of the chat: a question, which can be asked in other words, or an answer and its tokens.

import { button, copyText, element } from "./dom.js";
import { renderMarkdown } from "./markdown.js";
import { renderTokens } from "./tokens.js";

export class MessageView {
  // What the chat does: again() answers once more, askInstead(message, text) asks in other words, scroll() follows the answer.
  constructor(message, chat) {
    this.message = message;
    this.chat = chat;
    this.entries = []; // tokens with their probabilities; not kept in the history
    this.body = element("div", { class: "body" });
    this.note = element("span", { class: "note" });
    this.actions = element("span", { class: "actions" });
    const isQuestion = message.role === "user";
    this.box = element("article", { class: `message ${message.role}`, "aria-label": isQuestion ? "You" : "Model" }, this.body,
      element("footer", {}, this.note, this.actions));
    this.draw();
    if (isQuestion) this.actions.append(button("Edit", () => this.#edit(), { class: "quiet edit" }));
    else if (message.note !== undefined) this.finish();
  }

  refresh() {
    this.pending ??= requestAnimationFrame(() => {
      this.pending = undefined;
      this.draw();
      this.chat.scroll();
    });
  }

  draw() {
    const { role, content, reasoning, note } = this.message;
    if (role === "user") {
      this.body.textContent = content;
      return;
    }
    const wasOpen = this.body.querySelector("details.thinking")?.open ?? false;
    const parts = [];
    if (reasoning) {
      parts.push(element("details", { class: "thinking", open: wasOpen || !content },
        element("summary", {}, "Thinking"), renderMarkdown(reasoning)));
    }
    parts.push(renderMarkdown(content));
    if (!content && !reasoning) parts.push(element("span", { class: "pulse", "aria-label": "waiting for the first token" }));
    this.body.replaceChildren(...parts);
    this.note.textContent = note ?? "";
  }

  // The answer is complete.
  finish() {
    if (this.pending !== undefined) cancelAnimationFrame(this.pending);
    this.pending = undefined;
    this.draw();
    this.body.querySelector(".pulse")?.remove();
    const copy = button("Copy", () => copyText(this.message.content, copy));
    const again = button("Answer again", this.chat.again, { class: "quiet again", title: "Alt R" });
    this.actions.replaceChildren(...(this.entries.length ? [this.#tokensButton()] : []), copy, again);
  }

  #tokensButton() {
    const toggle = button("Tokens", () => {
      const on = toggle.getAttribute("aria-pressed") !== "true";
      toggle.setAttribute("aria-pressed", String(on));
      if (on) this.body.replaceChildren(renderTokens(this.entries));
      else this.draw();
    }, { "aria-pressed": "false", title: "See how likely each token was" });
    return toggle;
  }

  #edit() {
    const text = element("textarea", { "aria-label": "Edit the message", rows: Math.min(12, this.message.content.split("\n").length + 1) });
    text.value = this.message.content;
    const leave = () => {
      this.box.classList.remove("edited");
      this.draw();
      this.actions.querySelector(".edit").focus();
    };
    const send = () => {
      if (text.value.trim()) this.chat.askInstead(this.message, text.value.trim());
    };
    text.addEventListener("keydown", (event) => {
      if (event.isComposing || event.shiftKey) return;
      if (event.key === "Enter") send();
      else if (event.key === "Escape") leave();
      else return;
      event.preventDefault();
      event.stopPropagation();
    });
    this.box.classList.add("edited");
    this.body.replaceChildren(text, element("div", { class: "row" },
      element("span", { class: "note" }, "Replaces this message and all that follows."),
      button("Cancel", leave), button("Send", send, { class: "primary" })));
    text.focus();
  }
}
