// The server: requests with the API key, events of a stream, and errors in words.

const KEY = "cupyllm.key";

export const apiKey = () => sessionStorage.getItem(KEY) ?? "";
export const setApiKey = (key) => sessionStorage.setItem(KEY, key.trim());

export class ServerError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

// The answer to a request; throws ServerError, whose message can be shown.
export async function ask(path, { body, signal } = {}) {
  const headers = {};
  if (apiKey()) headers.authorization = `Bearer ${apiKey()}`;
  if (body !== undefined) headers["content-type"] = "application/json";
  let response;
  try {
    response = await fetch(path, {
      method: body === undefined ? "GET" : "POST",
      headers,
      body: body === undefined ? undefined : JSON.stringify(body),
      signal,
    });
  } catch (error) {
    if (signal?.aborted) throw error;
    throw new ServerError(0, "The server cannot be reached. Is it running?");
  }
  if (!response.ok) throw new ServerError(response.status, await wordsFor(response));
  return response;
}

// The JSON values of a stream of server-sent events, until it ends or says [DONE].
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let unread = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const parts = (unread + value).split("\n\n");
      unread = parts.pop();
      for (const part of parts) {
        const data = part.split("\n").find((line) => line.startsWith("data: "))?.slice(6);
        if (data === undefined) continue;
        if (data === "[DONE]") return;
        const event = JSON.parse(data);
        if (event.error) throw new ServerError(500, sentence(event.error.message));
        yield event;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

async function wordsFor(response) {
  let message = "";
  try {
    message = (await response.json()).error.message;
  } catch {
    // not the server's own words, such as a proxy's page
  }
  const known = {
    401: apiKey() ? "The server does not accept this API key." : "This server asks for an API key.",
    404: "The server does not have this.",
    413: "This is too long for the server.",
    429: "The server is busy. Try again in a moment.",
    503: "The engine takes no requests now.",
  };
  if (response.status === 401) return known[401];
  return [known[response.status], sentence(message)].filter(Boolean).join(" ") || `The server answered ${response.status}.`;
}

function sentence(text) {
  if (!text) return "";
  return text[0].toUpperCase() + text.slice(1) + (/[.!?]$/.test(text) ? "" : ".");
}
