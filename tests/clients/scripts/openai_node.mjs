// openai-node: models, plain, stream, errors. Arguments: base URL, model. Prints what it saw as JSON.
import OpenAI from "openai";

const [url, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL: url, apiKey: "none", maxRetries: 0 });
const messages = [{ role: "user", content: "What is the weather in Paris today?" }];
const asked = { model, messages, temperature: 0, max_tokens: 12 };
const seen = { models: [], errors: [] };
for await (const one of client.models.list()) seen.models.push(one.id);
seen.model = (await client.models.retrieve(model)).id;

const answer = await client.chat.completions.create(asked);
seen.chat = [answer.choices[0].message.content, answer.choices[0].finish_reason, answer.usage.completion_tokens];
seen.request_id = answer._request_id;

const stream = client.chat.completions.stream(asked);
let text = "";
for await (const chunk of stream) text += chunk.choices[0].delta.content ?? "";
seen.stream = [text, (await stream.finalChatCompletion()).choices[0].finish_reason];

const response = await client.responses.create({ model, input: messages, temperature: 0, max_output_tokens: 12 });
seen.response = response.output_text;

for (const fields of [{ temperature: 5 }, { model: "nope" }]) {
  try {
    await client.chat.completions.create({ ...asked, ...fields });
  } catch (error) {
    seen.errors.push([error.constructor.name, error.param, error.code]);
  }
}
console.log(JSON.stringify(seen));
