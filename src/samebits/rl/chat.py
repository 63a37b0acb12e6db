"""A model's tokenizer and chat template, read from its directory without the weight of a model library."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import Template, TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

Message = Mapping[str, str]


class ChatTokenizer:
    """Turns messages into token ids as the model expects them, and token ids back into text."""

    def __init__(self, model: Path) -> None:
        """Reads `tokenizer.json`, `tokenizer_config.json` and, if there is one, `chat_template.jinja`.

        Raises ValueError that names the file which is missing or malformed.
        """
        self._source = model
        self._config = _read_config(model / "tokenizer_config.json")
        self._tokenizer = _read_tokenizer(model / "tokenizer.json")
        self._template = self._read_template()

    def encode(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """Token ids of a conversation with the assistant's turn opened.

        A model without a chat template takes one user message as it stands. Raises ValueError where the
        template refuses the messages, or where there is no template and more than one user message.
        """
        return tuple(self._tokenizer.encode(self.render(messages), add_special_tokens=self._template is None).ids)

    def render(self, messages: Sequence[Message]) -> str:
        """The text that `encode` encodes."""
        if self._template is None:
            if [message["role"] for message in messages] != ["user"]:
                raise ValueError(f"{self._source} has no chat template: want one user message, got {len(messages)}")
            return messages[0]["content"]
        try:
            return self._template.render(messages=messages, add_generation_prompt=True, **self._special_tokens())
        except (TemplateError, TypeError) as error:
            raise ValueError(f"the chat template of {self._source} refuses the messages: {error}") from error

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids, special tokens left out."""
        return str(self._tokenizer.decode(list(ids)))

    def _read_template(self) -> Template | None:
        file = self._source / "chat_template.jinja"
        text = file.read_text(encoding="utf-8") if file.is_file() else self._config.get("chat_template")
        if text is None:
            return None
        if not isinstance(text, str):
            raise ValueError(f"{self._source}: chat_template must be one template, got {type(text).__name__}")
        try:
            return _environment().from_string(text)
        except TemplateError as error:
            raise ValueError(f"{self._source}: the chat template is malformed: {error}") from error

    def _special_tokens(self) -> dict[str, str]:
        named = {name: self._config.get(name) for name in ("bos_token", "eos_token", "pad_token", "unk_token")}
        texts = {name: token["content"] if isinstance(token, dict) else token for name, token in named.items()}
        return {name: token for name, token in texts.items() if isinstance(token, str)}


def _environment() -> ImmutableSandboxedEnvironment:
    """What chat templates are written for: trimmed blocks, loop controls and `raise_exception`."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = lambda value, indent=None: json.dumps(value, ensure_ascii=False, indent=indent)
    environment.globals["raise_exception"] = _refuse
    return environment


def _refuse(reason: str) -> NoReturn:
    raise TemplateError(reason)


def _read_config(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"{path} holds {type(config).__name__}, want a JSON object")
    return config


def _read_tokenizer(path: Path) -> Tokenizer:
    if not path.is_file():
        raise ValueError(f"{path} does not exist; want a tokenizer in the format of the tokenizers library")
    try:
        return Tokenizer.from_str(path.read_text(encoding="utf-8"))
    except Exception as error:  # the tokenizers library raises nothing narrower
        raise ValueError(f"{path} is not a tokenizer: {error}") from error
