"""langchain-openai: invoke, stream, tools. Arguments: base URL, model, what is asked. Prints what it saw as JSON."""

import json
import sys

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

url, model, what = sys.argv[1:]
chat = ChatOpenAI(base_url=url, api_key="none", model=model, temperature=0, max_retries=0, max_tokens=60)
question = "What is the weather in Paris today?"


@tool
def get_weather(city: str) -> str:
    """The weather in a city."""
    return "sunny"


if what == "text":
    answer = chat.invoke(question)
    pieces = list(chat.stream(question))
    seen = [answer.content, answer.usage_metadata["output_tokens"], "".join(piece.content for piece in pieces)]
elif what == "tools":
    calls = chat.bind_tools([get_weather]).invoke(question).tool_calls
    seen = [[call["name"], call["args"]] for call in calls]
else:
    whole = None
    for piece in chat.bind_tools([get_weather]).stream(question):
        whole = piece if whole is None else whole + piece
    seen = [[call["name"], call["args"]] for call in whole.tool_calls]
print(json.dumps(seen))
