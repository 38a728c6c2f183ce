"""litellm: plain, stream, error. Arguments: base URL, model. Prints what it saw as JSON."""

import json
import sys

import litellm

url, model = sys.argv[1:]
messages = [{"role": "user", "content": "What is the weather in Paris today?"}]
asked = {"model": f"openai/{model}", "api_base": url, "api_key": "none", "messages": messages, "max_retries": 0}
asked |= {"temperature": 0, "max_tokens": 12}
answer = litellm.completion(**asked)
chunks = list(litellm.completion(**asked, stream=True))
seen = {
    "chat": [answer.choices[0].message.content, answer.choices[0].finish_reason, answer.usage.completion_tokens],
    "stream": "".join(chunk.choices[0].delta.content or "" for chunk in chunks),
}
try:
    litellm.completion(**asked | {"temperature": 5})
except litellm.BadRequestError as error:
    seen["error"] = str(error)
print(json.dumps(seen))
