"""A model that says what a test wants: the logits are forced, and everything around them stays real."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from cupyllm.startup import LoadedModel
from cupyllm.tokenizer import Tokenizer
from tests.api.live_server import MESSAGES, LiveServer, frames

CHAT = "/v1/chat/completions"


class ScriptedOps:
    """Passes everything on to real ops, but the token `script[k]` is by far the most likely one at place k of every
    answer. Where a guide forbids it, the guide wins. An empty script changes nothing.
    """

    def __init__(self, loaded: LoadedModel) -> None:
        self._ops = loaded.engine.ops
        loaded.engine.ops = self
        self._script: list[int] = []
        self._begin: int | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ops, name)

    def play(self, script: list[int]) -> None:
        """For the next request; no other may run beside it."""
        self._script, self._begin = script, None

    def sample(self, logits: Any, sampling: Any) -> Any:
        if self._script:
            logits = np.array(logits)
            if self._begin is None:
                self._begin = int(sampling.positions.min())
            for row, position in enumerate(sampling.positions.tolist()):
                place = position - self._begin
                if 0 <= place < len(self._script):
                    logits[row, self._script[place]] += 1e4
        return self._ops.sample(logits, sampling)


def script_of(tokenizer: Tokenizer, text: str, end: str = "<|im_end|>") -> list[int]:
    """The tokens of a text, marks as marks, and the end token behind it."""
    return [*tokenizer.encode(text), tokenizer.added_tokens[end]]


class Actor:
    """A server whose model says what it is told."""

    def __init__(self, server: LiveServer, ops: ScriptedOps) -> None:
        self.server, self._ops = server, ops

    def tell(self, text: str) -> None:
        """What to say to the next request, once the one before has left the engine."""
        while self.server.loaded.engine.has_work:
            time.sleep(0.001)
        self._ops.play(script_of(self.server.loaded.tokenizer, text))

    def ask(self, text: str, **fields: Any) -> Any:
        """The first choice of the plain answer."""
        self.tell(text)
        response = self.server.post(CHAT, {"messages": MESSAGES, "temperature": 0, **fields})
        assert response.status_code == 200, response.text
        return response.json()["choices"][0]

    def ask_stream(self, text: str, **fields: Any) -> list[Any]:
        """The chunks of the streamed answer."""
        self.tell(text)
        body = {"messages": MESSAGES, "temperature": 0, "stream": True, **fields}
        return frames(self.server.post(CHAT, body))[:-1]


def put_together(chunks: list[Any], index: int = 0) -> Any:
    """The choice that the chunks are pieces of, by the rules of the contract."""
    message: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": []}
    reason = None
    for choice in (choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index):
        assert reason is None, "nothing comes after the finish reason"
        delta, reason = choice["delta"], choice["finish_reason"]
        for key in ("content", "reasoning_content"):
            message[key] += delta.get(key, "")
        for call in delta.get("tool_calls", []):
            if call["index"] == len(message["tool_calls"]):
                assert set(call) == {"index", "id", "type", "function"}
                assert call["function"] == {"name": call["function"]["name"], "arguments": ""}
                message["tool_calls"].append({"id": call["id"], "type": call["type"], "function": call["function"]})
            else:
                assert set(call) == {"index", "function"}
                assert set(call["function"]) == {"arguments"}
                message["tool_calls"][call["index"]]["function"]["arguments"] += call["function"]["arguments"]
    return {"message": message, "finish_reason": reason}


def without_ids(choice: Any) -> tuple[Any, ...]:
    """What does not depend on random ids."""
    message = choice["message"]
    calls = [
        (call["type"], call["function"]["name"], call["function"]["arguments"])
        for call in message.get("tool_calls", [])
    ]
    return message["content"] or "", message.get("reasoning_content", ""), calls, choice["finish_reason"]
