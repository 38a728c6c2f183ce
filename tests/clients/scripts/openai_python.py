"""What every version of openai-python from 1.0 on can do. Arguments: base URL, model. Prints what it saw as JSON."""

import json
import sys

import openai

url, model = sys.argv[1:]
client = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
messages = [{"role": "user", "content": "What is the weather in Paris today?"}]
asked = {"model": model, "messages": messages, "temperature": 0, "max_tokens": 12}
seen = {"models": [one.id for one in client.models.list()], "model": client.models.retrieve(model).id}

answer = client.chat.completions.create(**asked)
seen["chat"] = [answer.choices[0].message.content, answer.choices[0].finish_reason, answer.usage.completion_tokens]
chunks = list(client.chat.completions.create(**asked, stream=True))
seen["stream"] = [
    "".join(chunk.choices[0].delta.content or "" for chunk in chunks),
    chunks[-1].choices[0].finish_reason,
]
both = client.chat.completions.create(**asked, n=2)
seen["n"] = [choice.index for choice in both.choices]

text = {"model": model, "prompt": ["the", "weather"], "temperature": 0, "max_tokens": 8}
seen["text"] = [choice.text for choice in client.completions.create(**text, logprobs=2).choices]
pieces = {0: "", 1: ""}
for chunk in client.completions.create(**text, stream=True):
    for choice in chunk.choices:
        pieces[choice.index] += choice.text
seen["text_stream"] = list(pieces.values())

seen["errors"] = []
for fields in ({"temperature": 5}, {"model": "nope"}):
    try:
        client.chat.completions.create(**{**asked, **fields})
    except openai.APIStatusError as error:
        told = error.response.json()["error"]  # 1.0 has no attributes for it
        seen["errors"].append([type(error).__name__, told["param"], told["code"]])
print(json.dumps(seen))
