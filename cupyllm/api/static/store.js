// What this browser keeps: conversations and settings, in localStorage.

const CONVERSATIONS = "cupyllm.conversations";
const SETTINGS = "cupyllm.settings";
const MOST_CONVERSATIONS = 100;

// A conversation is { id, title, changed, system, messages }, a message { role, content, reasoning?, note? }.
export const newConversation = (system = "") => ({
  id: `${Date.now()}-${Math.random().toString(36).slice(2)}`, title: "", changed: Date.now(), system, messages: [],
});

export const conversations = () => read(CONVERSATIONS, []);
export const settings = () => read(SETTINGS, {});
export const saveSettings = (values) => write(SETTINGS, values);

export function saveConversation(conversation) {
  if (!conversation.messages.length) return;
  conversation.changed = Date.now();
  conversation.title = conversation.messages[0].content.slice(0, 80);
  const others = conversations().filter((other) => other.id !== conversation.id);
  let kept = [conversation, ...others].slice(0, MOST_CONVERSATIONS);
  while (!write(CONVERSATIONS, kept) && kept.length > 1) kept = kept.slice(0, -1); // full: the oldest goes
}

export function forget(id) {
  write(CONVERSATIONS, conversations().filter((conversation) => conversation.id !== id));
}

export const forgetAll = () => write(CONVERSATIONS, []);

function read(key, otherwise) {
  try {
    return JSON.parse(localStorage.getItem(key)) ?? otherwise;
  } catch {
    return otherwise;
  }
}

function write(key, value) {
  try {
    localStorage.setItem(key, JSON.stringify(value));
    return true;
  } catch {
    return false;
  }
}
