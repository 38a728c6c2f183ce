"""A model folder's chat template: messages in, the model's prompt out, as text or as token ids.

A chat template is a Jinja program that writes the conversation with control tokens around it (`<|im_start|>user` ...).
Here it runs in the environment that Hugging Face gives it, in a sandbox, and any failure is a RequestError.

No text of the caller becomes a control token. Before rendering, each piece of the caller's text that could be read as
one is replaced by a stand-in (control_text.py). The rendered text is split at the control tokens it holds now, all of
them the template's own; then the stand-ins are put back and what lies between the control tokens is encoded as ordinary
text. For conversations without such text the ids are exactly Hugging Face's. For those with it:

- A template that looks for a control token's text in a message does not find it. Qwen3's takes a user message inside
  `<tool_response>` marks for a tool result; here that is a user message like any other.
- The exception is `</think>` in an assistant message, because clients send the model's answers back whole. Where the
  template splits such text, it is split here by the template's rule and handed over as `reasoning_content` and the
  rest; the control tokens around the reasoning are then again the template's own.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.meta
from jinja2.sandbox import ImmutableSandboxedEnvironment

from cupyllm.control_text import RiskyText, StandIns
from cupyllm.errors import CheckpointError, RequestError
from cupyllm.tokenizer import Tokenizer

TEMPLATE_FILE = "chat_template.jinja"
TOOL_TEMPLATE_FILE = "additional_chat_templates/tool_use.jinja"
MAX_PROMPT_CHARS = 1 << 25  # ends a template that writes without end; no model's context is as long

_SPLITS_THINKING = re.compile(r"""split\(\s*['"]</think>['"]""")

Messages = list[dict[str, Any]]
Tools = list[dict[str, Any]]


class ChatTemplate:
    """The chat template of one model folder. Nothing changes after it is made, so threads may share it."""

    def __init__(self, tokenizer: Tokenizer, default: _Program, tool_use: _Program | None = None) -> None:
        self._tokenizer = tokenizer
        self._default = default
        self._tool_use = tool_use or default
        self._risky = RiskyText(tokenizer)

    @classmethod
    def from_folder(cls, folder: Path, tokenizer: Tokenizer) -> ChatTemplate | None:
        """The folder's template, or None where it has none (a base model).

        chat_template.jinja (transformers 5) wins over `chat_template` in tokenizer_config.json (transformers 4), which
        is one template or a list of named ones; the one named "tool_use" is used when tools are given. Raises
        CheckpointError naming file and key when a template cannot be read or is not Jinja.
        """
        sources = _read_template_files(folder) or _templates_in_config(tokenizer)
        if not sources:
            return None
        programs = {name: _compile(source, where) for name, (source, where) in sources.items()}
        return cls(tokenizer, programs["default"], programs.get("tool_use"))

    def render(
        self,
        messages: Messages,
        *,
        tools: Tools | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        enable_thinking: bool | None = None,
    ) -> str:
        """The prompt as text, for showing. Encoding this text again could turn a caller's text into control tokens.

        `messages` are those that `normalise_messages` gives. Raises RequestError as `encode` does.
        """
        stand_ins = StandIns(self._risky)
        values = self._values(tools, add_generation_prompt, enable_thinking)
        return stand_ins.put_back(self._render(stand_ins, messages, values, continue_final_message))

    def encode(
        self,
        messages: Messages,
        *,
        tools: Tools | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        enable_thinking: bool | None = None,
    ) -> list[int]:
        """The prompt as token ids; every control token in it was written by the template.

        With `continue_final_message` the prompt ends with the content of the last message, which the model is to go on
        writing; to be used without `add_generation_prompt`.

        Raises RequestError when the template refuses the messages or fails on them, and for tools or an
        `enable_thinking` that the template would ignore although they matter.
        """
        stand_ins = StandIns(self._risky)
        values = self._values(tools, add_generation_prompt, enable_thinking)
        text = self._render(stand_ins, messages, values, continue_final_message)
        ids: list[int] = []
        for piece, control_id in self._tokenizer.split_at_added_tokens(text):
            if control_id is not None:
                ids.append(control_id)
            else:
                ids += self._tokenizer.encode(stand_ins.put_back(piece), control_tokens=False)
        return ids

    def _values(self, tools: Tools | None, generate: bool, thinking: bool | None) -> dict[str, Any]:
        """The template's variables, but for the messages."""
        values: dict[str, Any] = {**self._tokenizer.named_tokens, "tools": tools, "add_generation_prompt": generate}
        if thinking is not None:
            values["enable_thinking"] = thinking
        return values

    def _render(self, stand_ins: StandIns, messages: Messages, values: dict[str, Any], unfinished: bool) -> str:
        """The template's text with the stand-ins still in it; up to the end of the last content if it is unfinished."""
        program = self._tool_use if values["tools"] else self._default
        program.check(values)
        if program.splits_thinking:
            messages = [_split_thinking(message) for message in messages]
        try:
            messages = stand_ins.replace_in(messages)
            if unfinished:
                messages[-1]["content"] += stand_ins.end_mark
            values = values | {"messages": messages, "tools": stand_ins.replace_in(values["tools"])}
            text = _joined(program.template.generate(values))
            return _before(stand_ins.end_mark, text) if unfinished else text
        except RequestError:
            raise
        except jinja2.TemplateError as error:
            reason = str(error.message)
        except Exception as error:  # a template is a program from the model folder: it can raise anything
            reason = f"{type(error).__name__}: {error}"
        short = stand_ins.put_back(reason)[:200]
        raise RequestError(f"the chat template cannot render these messages: {short}", param="messages")


@dataclass(frozen=True)
class _Program:
    """A compiled template and what its source says about tools and thinking."""

    template: jinja2.Template
    reads_tools: bool
    reads_enable_thinking: bool
    writes_thinking: bool
    splits_thinking: bool

    def check(self, values: dict[str, Any]) -> None:
        """Refuse what this template would ignore. A model that never thinks honours that thinking is switched off."""
        if values["tools"] and not self.reads_tools:
            raise RequestError("this model's chat template cannot show tools; leave them out", param="tools")
        wanted = values.get("enable_thinking")
        if wanted is not None and not self.reads_enable_thinking and (wanted or self.writes_thinking):
            raise RequestError(
                "this model's chat template has no enable_thinking switch; leave it out",
                param="chat_template_kwargs.enable_thinking",
            )


def _compile(source: str, where: str) -> _Program:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    try:
        variables = jinja2.meta.find_undeclared_variables(environment.parse(source))
        template = environment.from_string(source)
    except jinja2.TemplateSyntaxError as error:
        raise CheckpointError(f"{where} is not a Jinja template: line {error.lineno}: {error.message}") from None
    splits_thinking = _SPLITS_THINKING.search(source) is not None
    reads = ("tools" in variables, "enable_thinking" in variables)
    return _Program(template, *reads, "<think>" in source, splits_thinking)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as models saw it in training: keys in their order, no escapes for HTML, letters of every script as they are.

    Jinja's own filter of this name sorts keys and escapes. The defaults are Hugging Face's.
    """
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _joined(pieces: Iterable[str]) -> str:
    text, size = [], 0
    for piece in pieces:
        size += len(piece)
        if size > MAX_PROMPT_CHARS:
            raise RequestError(f"the prompt is longer than {MAX_PROMPT_CHARS} characters", param="messages")
        text.append(piece)
    return "".join(text)


def _before(mark: str, text: str) -> str:
    before, found, _ = text.partition(mark)
    if not found:
        raise RequestError(
            "the chat template does not show the last message, so it cannot be continued", param="messages"
        )
    return before


def _split_thinking(message: dict[str, Any]) -> dict[str, Any]:
    """An answer that was sent back with its reasoning in front, taken apart by the rule of Qwen3's template."""
    content = message.get("content")
    if message.get("role") != "assistant" or "reasoning_content" in message or not isinstance(content, str):
        return message
    parts = content.split("</think>")
    if len(parts) == 1:
        return message
    reasoning = parts[0].split("<think>")[-1].strip("\n")
    return {**message, "reasoning_content": reasoning, "content": parts[-1].lstrip("\n")}


def _read_template_files(folder: Path) -> dict[str, tuple[str, str]]:
    """Name -> (source, where it is from)."""
    found = {}
    for name, file in (("default", TEMPLATE_FILE), ("tool_use", TOOL_TEMPLATE_FILE)):
        path = folder / file
        try:
            found[name] = (path.read_text(encoding="utf-8"), str(path))
        except FileNotFoundError:
            continue
        except (OSError, UnicodeDecodeError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from None
    return found if "default" in found else {}


def _templates_in_config(tokenizer: Tokenizer) -> dict[str, tuple[str, str]]:
    """As above, from tokenizer_config.json."""
    key, config = "chat_template", tokenizer.config
    value = config.values.get(key)
    if value is None:
        return {}
    where = f"{config.file}: {key}"
    if isinstance(value, str):
        return {"default": (value, where)}
    try:
        found = {entry["name"]: (entry["template"], f"{where} {entry['name']!r}") for entry in value}
        well_formed = all(isinstance(source, str) for source, _ in found.values())
    except (TypeError, KeyError):
        well_formed = False
    if not well_formed:
        config.fail(key, "is neither a template nor a list of {name, template}")
    if "default" not in found:
        config.fail(key, 'is a list of templates of which none is named "default"')
    return found
