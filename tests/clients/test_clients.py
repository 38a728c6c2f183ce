"""Each client sees exactly what the server said, streamed and not, and its own kinds of error."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.api.live_server import MESSAGES, MODEL_NAME, LiveServer
from tests.api.scripted import Actor
from tests.clients.conftest import SCRIPTS, installed, run_client, run_script

PARIS = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
WRONG_VALUE = ["BadRequestError", "temperature", None]
WRONG_MODEL = ["NotFoundError", None, "model_not_found"]


@pytest.fixture
def chat(server: LiveServer) -> list[Any]:
    """Text, finish reason and number of tokens of the answer that all clients ask for."""
    body = {"messages": MESSAGES, "temperature": 0, "max_tokens": 12}
    answer = server.post("/v1/chat/completions", body).json()
    (choice,) = answer["choices"]
    assert choice["message"]["content"]
    return [choice["message"]["content"], choice["finish_reason"], answer["usage"]["completion_tokens"]]


@pytest.mark.parametrize("version", ["newest", "oldest"])
def test_27_openai_python(server: LiveServer, chat: list[Any], version: str) -> None:
    python = sys.executable if version == "newest" else installed("CUPYLLM_TEST_OLDEST_OPENAI")
    seen = run_script(python, server, "openai_python.py")
    body = {"prompt": ["the", "weather"], "temperature": 0, "max_tokens": 8}
    texts = [choice["text"] for choice in server.post("/v1/completions", body).json()["choices"]]
    assert seen == {
        "models": [MODEL_NAME],
        "model": MODEL_NAME,
        "chat": chat,
        "stream": chat[:2],
        "n": [0, 1],
        "text": texts,
        "text_stream": texts,
        "errors": [WRONG_VALUE, WRONG_MODEL],
    }


def test_27_openai_node(server: LiveServer, chat: list[Any], tmp_path: Path) -> None:
    folder = Path(installed("CUPYLLM_TEST_NODE"))
    # Node looks for packages from where the script lies.
    script = shutil.copy(SCRIPTS / "openai_node.mjs", tmp_path)
    (tmp_path / "node_modules").symlink_to(folder.resolve() / "node_modules")
    seen = json.loads(run_client("node", str(script), f"{server.url}/v1", MODEL_NAME, cwd=tmp_path))
    assert seen.pop("request_id").startswith("req_")
    assert seen == {
        "models": [MODEL_NAME],
        "model": MODEL_NAME,
        "chat": chat,
        "stream": chat[:2],
        "response": chat[0],
        "errors": [WRONG_VALUE, WRONG_MODEL],
    }


def test_27_langchain(actor: Actor) -> None:
    python = installed("CUPYLLM_TEST_CLIENTS")
    actor.tell("the weather is fine")
    text, num_tokens, streamed = run_script(python, actor.server, "langchain_chat.py", "text")
    assert (text, streamed) == ("the weather is fine",) * 2
    assert num_tokens > 1


@pytest.mark.parametrize("what", ["tools", "streamed tools"])
def test_27_langchain_calls_tools(actor: Actor, what: str) -> None:
    python = installed("CUPYLLM_TEST_CLIENTS")
    actor.tell(PARIS)
    assert run_script(python, actor.server, "langchain_chat.py", what) == [["get_weather", {"city": "Paris"}]]


def test_27_litellm(server: LiveServer, chat: list[Any]) -> None:
    seen = run_script(installed("CUPYLLM_TEST_CLIENTS"), server, "litellm_chat.py")
    assert (seen["chat"], seen["stream"]) == (chat, chat[0])
    assert "temperature" in seen["error"]


@pytest.mark.parametrize("mode", ["TOOLS", "JSON_SCHEMA"])
def test_27_instructor(actor: Actor, mode: str) -> None:
    python = installed("CUPYLLM_TEST_CLIENTS")
    weather = '{"city": "Paris", "degrees": 21}'
    call = f'<tool_call>\n{{"name": "Weather", "arguments": {weather}}}\n</tool_call>'
    actor.tell(call if mode == "TOOLS" else weather)
    assert run_script(python, actor.server, "instructor_model.py", mode) == {"city": "Paris", "degrees": 21}


@pytest.mark.parametrize("options", [[], ["--no-stream"]])
def test_27_the_llm_command(actor: Actor, options: list[str], tmp_path: Path) -> None:
    program = Path(installed("CUPYLLM_TEST_CLIENTS")).parent / "llm"
    model = {"model_id": "mine", "model_name": MODEL_NAME, "api_base": f"{actor.server.url}/v1", "api_key_name": "none"}
    (tmp_path / "extra-openai-models.yaml").write_text(json.dumps([model]), encoding="utf-8")
    actor.tell("the weather is fine")
    printed = run_client(
        str(program), "-m", "mine", "weather?", "--no-log", "--key", "none", *options, LLM_USER_PATH=str(tmp_path)
    )
    assert printed.strip() == "the weather is fine"
