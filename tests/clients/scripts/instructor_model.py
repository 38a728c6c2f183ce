"""instructor: an answer as a typed object, by a tool or by a JSON schema. Arguments: base URL, model, mode."""

import json
import sys

import instructor
import openai
import pydantic

url, model, mode = sys.argv[1:]


class Weather(pydantic.BaseModel):
    """The weather in a city."""

    city: str
    degrees: int


client = instructor.from_openai(openai.OpenAI(base_url=url, api_key="none", max_retries=0), mode=instructor.Mode[mode])
answer = client.chat.completions.create(
    model=model,
    messages=[{"role": "user", "content": "What is the weather in Paris today?"}],
    response_model=Weather,
    temperature=0,
    max_tokens=100,
    max_retries=0,
)
print(json.dumps(answer.model_dump()))
