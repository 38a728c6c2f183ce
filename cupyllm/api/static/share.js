// "Watch it share": one long prompt, asked for four answers at once and then by four requests of their own.

import { ask } from "./api.js";

const TEXT = `A server keeps the keys and values of every token that it has read. They are stored in pages of a few tokens
each, and a page table says which pages belong to a sequence. Two sequences that begin with the same words would write the
same pages, so they share them: the page counts who holds it. When one of them writes to a page that others hold, it gets a
copy first. `;

// Sends it all; resolves when the last answer is complete.
export async function sendShared({ model, pageSize, maxModelLen }) {
  const messages = await longPrompt(model, pageSize, Math.min(640, Math.floor(maxModelLen / 2)));
  const body = { model, messages, temperature: 1, max_tokens: Math.min(48, Math.floor(maxModelLen / 8)) };
  const send = async (fields) => (await ask("/v1/chat/completions", { body: { ...body, ...fields } })).json();
  await send({ n: 4, seed: 1 });
  await Promise.all([2, 3, 4, 5].map((seed) => send({ seed })));
}

// A prompt of about `wanted` tokens that no earlier one began like, and whose last page is not full, so that it is copied.
async function longPrompt(model, pageSize, wanted) {
  for (let copies = 1; ; copies += 1) {
    const content = `Question ${Math.floor(Math.random() * 1e6)}. ${TEXT.replaceAll("\n", " ").repeat(copies)}What is a page?`;
    const messages = [{ role: "user", content }];
    const { count } = await (await ask("/tokenize", { body: { model, messages } })).json();
    if (count * (1 + 1 / copies) > wanted && count % pageSize !== 0) return messages;
  }
}
