"""Conversations as text by a template, and which of its tokens are learned: what the assistant says. Torch-free.

A row has `messages` of role and content, or an instruction and its answer. A template is Jinja, as tokenizers carry it;
what the assistant's turn begins with is not learned, how it ends is.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import fsspec
import numpy as np
from jinja2 import TemplateError
from jinja2.ext import Extension
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from workers.data import text
from workers.data.text import DataError
from workers.data.tokens import Tokenizer

Messages = Sequence[Mapping[str, Any]]
Span = tuple[int, int]

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CONFIG = "tokenizer_config.json"
ASKED = ("instruction", "prompt", "question")
ANSWERED = ("output", "response", "completion", "answer")


class Generation(Extension):
    """`{% generation %}` marks what is learned in some templates; here that is told by rendering turn by turn."""

    tags: ClassVar[set[str]] = {"generation"}  # type: ignore[misc]

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class Template:
    """Renders conversations. `uri` names it in messages."""

    def __init__(self, source: str, uri: str = "chatml", tokens: Mapping[str, str] | None = None) -> None:
        self.uri, self.tokens = uri, dict(tokens or {})
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation])
        environment.globals["raise_exception"] = _raise  # and no clock: what is trained on is the same every day
        environment.filters["tojson"] = lambda value, **options: json.dumps(value, ensure_ascii=False, **options)
        try:
            self.template = environment.from_string(source)
        except TemplateError as error:
            raise DataError(f"data.template: {uri} is no template: {error}") from None

    @classmethod
    def of(cls, name: str, tokenizer: str) -> Template:
        """As `data.template` says."""
        if name == "chatml":
            return cls(CHATML)
        if name != "auto":
            return _read(name)
        folder = tokenizer.rpartition("/")[0]
        for file in ("chat_template.jinja", CONFIG):
            beside = f"{folder}/{file}" if folder else file
            if tokenizer != "byte" and _exists(beside) and (found := _read(beside, missing=True)) is not None:
                return found
        return cls(CHATML)

    def render(self, messages: Messages, prompt: bool = False) -> str:
        """`prompt`: with what the assistant's next turn begins with."""
        return self.template.render(messages=messages, add_generation_prompt=prompt, **self.tokens)

    def spans(self, messages: Messages, place: str) -> tuple[str, list[Span]]:
        """The text of a conversation, and from where to where in it the assistant speaks."""
        try:
            whole = self.render(messages)
            spans = [self._span(messages, turn) for turn, one in enumerate(messages) if one["role"] == "assistant"]
            ends = [self.render(messages[: turn + 1]) for turn in range(len(messages))]
        except (TemplateError, TypeError) as error:
            raise DataError(f"{place}: template {self.uri} does not take it: {error}") from None
        if any(not whole.startswith(one) for one in ends):
            raise DataError(
                f"{place}: template {self.uri} renders earlier messages otherwise once there are more: what the "
                "assistant says can't be told"
            )
        return whole, spans

    def _span(self, messages: Messages, turn: int) -> Span:
        before, after = self.render(messages[:turn], prompt=True), self.render(messages[: turn + 1])
        if not after.startswith(before):  # no prompt, or another one than the turn begins with
            before = self.render(messages[:turn])
        return len(before), len(after)


def encoded(source: str, field: str, template: Template, using: Tokenizer) -> list[tuple[np.ndarray, np.ndarray]]:
    """(ids, which are learned) of each conversation of a source in a fixed order. DataError where one is none."""
    found = []
    for uri in text.files(source):
        for place, row in text.records(uri):
            whole, spans = template.spans(messages_of(row, field, place), place)
            ids, at = using.placed(text.whole(whole))
            found.append((ids, _inside(at, spans)))
    if not any(learned.any() for _, learned in found):
        raise DataError(f"{source}: the assistant says nothing in it, and there is nothing to learn")
    return found


def messages_of(row: Mapping[str, Any], field: str, place: str) -> list[dict[str, Any]]:
    """The conversation of a row: under `field`, or `messages`; or an instruction, perhaps an input, and an answer."""
    talk = row.get(field) if field != "text" else row.get("messages")
    if talk is None:
        talk = list(_instruction(row))
    fits = isinstance(talk, list) and talk and all(_is_message(one) for one in talk)
    if not fits:
        raise DataError(
            f"{place} has no conversation: messages of role and content, or {' or '.join(ASKED)} with "
            f"{' or '.join(ANSWERED)}; its fields are {', '.join(map(str, row))}"
        )
    return [dict(one) for one in talk]


def _instruction(row: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    asked = next((row[name] for name in ASKED if isinstance(row.get(name), str)), None)
    answered = next((row[name] for name in ANSWERED if isinstance(row.get(name), str)), None)
    if asked is None or answered is None:
        return
    if isinstance(row.get("system"), str) and row["system"]:
        yield {"role": "system", "content": row["system"]}
    more = row.get("input")
    yield {"role": "user", "content": f"{asked}\n\n{more}" if isinstance(more, str) and more else asked}
    yield {"role": "assistant", "content": answered}


def _is_message(one: Any) -> bool:
    return isinstance(one, Mapping) and isinstance(one.get("role"), str) and isinstance(one.get("content"), str)


def _inside(at: np.ndarray, spans: Sequence[Span]) -> np.ndarray:
    """Which tokens, that begin at these characters, belong to one of the spans."""
    learned = np.zeros(len(at), dtype=bool)
    for first, end in spans:
        learned |= (at >= first) & (at < end)
    return learned


def _read(uri: str, missing: bool = False) -> Template | None:
    """A template's file. None: `missing` is no fault, and the tokenizer_config.json names none."""
    try:
        with fsspec.open(uri, "rt", encoding="utf-8") as file:
            source = file.read()
    except FileNotFoundError:
        raise DataError(f"data.template: {uri} is not there; use chatml, or the path or URI of a template") from None
    if not uri.endswith(".json"):
        return Template(source, uri, _tokens(f"{uri.rpartition('/')[0]}/{CONFIG}"))
    found = json.loads(source).get("chat_template")
    if isinstance(found, str):
        return Template(found, uri, _tokens(uri))
    if missing:
        return None
    raise DataError(f"data.template: {uri} has no chat_template; use chatml, or name another one")


def _tokens(config: str) -> dict[str, str]:
    """Those that a tokenizer_config.json names, where there is one."""
    if not _exists(config):
        return {}
    with fsspec.open(config, "rt", encoding="utf-8") as file:
        told = json.load(file)
    named = {name: told.get(name) for name in ("bos_token", "eos_token", "unk_token", "pad_token")}
    return {name: _token(value) for name, value in named.items() if value is not None}


def _token(value: Any) -> str:
    """A token is text, or a mapping that has it."""
    return str(value["content"]) if isinstance(value, Mapping) else str(value)


def _exists(uri: str) -> bool:
    fs, path = fsspec.core.url_to_fs(uri)
    return bool(fs.exists(path))


def _raise(message: str) -> None:
    raise TemplateError(message)
