"""What `chat` remembers, and the commands that change it."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cupyllm.cli.sources import SETTINGS, Messages, with_setting
from cupyllm.errors import ConfigError

HELP = f"""\
/system TEXT      the system prompt from now on; without TEXT none
/set              the settings that are not left to the model
/set NAME VALUE   {", ".join(SETTINGS)};
                  VALUE "default" leaves it to the model again
/retry            answer the last question again
/reset            forget the conversation, keep system prompt and settings
/save FILE        write the conversation and the settings as JSON
/quit             end (also Ctrl-D)"""


@dataclass
class Conversation:
    """Questions and answers in turn, after the system prompt."""

    system: str | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    turns: Messages = field(default_factory=list)
    has_ended: bool = False

    @property
    def messages(self) -> Messages:
        """What a model is to answer."""
        return [*([] if self.system is None else [{"role": "system", "content": self.system}]), *self.turns]

    @property
    def is_asked(self) -> bool:
        """Whether a question stands unanswered."""
        return bool(self.turns) and self.turns[-1]["role"] == "user"

    def ask(self, text: str) -> None:
        self.turns.append({"role": "user", "content": text})

    def answered(self, text: str) -> None:
        self.turns.append({"role": "assistant", "content": text})

    def give_up(self) -> None:
        """The question cannot be answered: it is forgotten, so that the next one has a chance."""
        if self.is_asked:
            self.turns.pop()


def carry_out(line: str, talk: Conversation) -> str:
    """Carry out a command such as "/set seed 7"; returns what to show. Raises ConfigError and RequestError."""
    name, _, rest = line[1:].strip().partition(" ")
    rest = rest.strip()
    if name not in ("system", "set", "save") and rest:
        raise ConfigError(f"/{name} takes nothing behind it")
    if name == "help":
        return HELP
    if name == "system":
        talk.system = rest or None
    elif name == "set":
        return _set(rest, talk)
    elif name == "retry":
        if not talk.turns:
            raise ConfigError("/retry: nothing was asked yet")
        talk.turns.pop()
    elif name == "reset":
        talk.turns.clear()
    elif name == "save":
        return _save(rest, talk)
    elif name == "quit":
        talk.has_ended = True
    else:
        raise ConfigError(f"there is no command /{name}; /help lists them")
    return ""


def _set(rest: str, talk: Conversation) -> str:
    name, _, value = rest.partition(" ")
    if value:
        talk.settings = with_setting(talk.settings, name, value.strip())
    elif name:
        raise ConfigError(f"/set {name} needs a value")
    return "\n".join(f"{key} {json.dumps(value)}" for key, value in talk.settings.items()) or "all left to the model"


def _save(file: str, talk: Conversation) -> str:
    if not file:
        raise ConfigError("/save needs a file")
    try:
        Path(file).write_text(json.dumps({"messages": talk.messages, **talk.settings}, indent=1) + "\n", "utf-8")
    except OSError as error:
        raise ConfigError(f"{file} cannot be written: {error.strerror}") from None
    return f"written to {file}"
