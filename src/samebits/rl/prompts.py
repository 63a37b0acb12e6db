"""Problems from a JSONL file in the shape of dapo-math-17k, in an order that a seed fixes."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

from samebits.timeline.types import Prompt

LONGEST_PROMPT = 512


class PromptTokenizer(Protocol):
    """What prompts need of a tokenizer: the ids of a conversation with the assistant's turn opened."""

    def encode(self, messages: Sequence[dict[str, str]]) -> tuple[int, ...]: ...


class PromptSet:
    """The problems of one file. `dropped` counts those that were longer than the limit."""

    def __init__(self, path: Path, tokenizer: PromptTokenizer, max_prompt_length: int = LONGEST_PROMPT) -> None:
        """Reads and encodes every line: `{"prompt": text or list of messages, "label": text or integer}`.

        Raises ValueError that names the file, and the line where there is one: malformed JSON, missing
        keys, wrong types, no problems, or none of at most `max_prompt_length` tokens.
        """
        self._path = path
        prompts = list(_read(path, tokenizer))
        if not prompts:
            raise ValueError(f"{path} holds no problems; want one JSON object with prompt and label on each line")
        self._prompts = tuple(prompt for prompt in prompts if len(prompt.token_ids) <= max_prompt_length)
        self.dropped = len(prompts) - len(self._prompts)
        if not self._prompts:
            shortest = min(len(prompt.token_ids) for prompt in prompts)
            raise ValueError(
                f"{path}: the shortest of {len(prompts)} prompts has {shortest} tokens, more than the "
                f"{max_prompt_length} that max_prompt_length allows"
            )

    def __len__(self) -> int:
        return len(self._prompts)

    def batch(self, step: int, count: int, seed: int) -> tuple[Prompt, ...]:
        """`count` different prompts for one step.

        Steps walk through a permutation of the file; each epoch has its own and leaves out its last,
        incomplete batch. Any step can be asked for, in any order. ValueError when `count` is below 1 or
        exceeds the file, or `step` is negative.
        """
        if not 1 <= count <= len(self._prompts):
            raise ValueError(
                f"a batch of {count} prompts was asked for; want 1 to {len(self._prompts)}, the usable ones of "
                f"{self._path}: add problems, or lower global_batch_size (of an evaluation: eval_prompts)"
            )
        if step < 0:
            raise ValueError(f"step must not be negative, got {step}")
        epoch, slot = divmod(step, len(self._prompts) // count)
        order = _permutation(len(self._prompts), seed, epoch)
        return tuple(self._prompts[index] for index in order[slot * count : (slot + 1) * count])


@lru_cache(maxsize=8)
def _permutation(size: int, seed: int, epoch: int) -> tuple[int, ...]:
    order = list(range(size))
    random.Random(f"{seed}/{epoch}").shuffle(order)
    return tuple(order)


def _read(path: Path, tokenizer: PromptTokenizer) -> Iterator[Prompt]:
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise ValueError(f"cannot read the problems {path}: {error.strerror}") from error
    if lines[-1] == b"":
        lines.pop()
    for index, line in enumerate(lines):
        try:
            messages, label = _problem(line)
            token_ids = tokenizer.encode(messages)
        except ValueError as error:
            raise ValueError(f"{path}, line {index + 1}: {error}") from error
        yield Prompt(index=index, token_ids=token_ids, label=label, text=messages[-1]["content"])


def _problem(line: bytes) -> tuple[list[dict[str, str]], str]:
    """Messages and label of one line."""
    try:
        record = json.loads(line.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not valid JSON: {error}") from error
    if not isinstance(record, dict):
        raise ValueError(f"a JSON {type(record).__name__}, want an object with prompt and label")
    missing = [key for key in ("prompt", "label") if key not in record]
    if missing:
        raise ValueError(f"no {' and no '.join(missing)}; the line has {', '.join(record) or 'no keys'}")
    return _messages(record["prompt"]), _label(record["label"])


def _messages(prompt: Any) -> list[dict[str, str]]:
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if not isinstance(messages, list) or not messages or not all(map(_is_message, messages)):
        raise ValueError(f"prompt must be a text or a list of messages with role and content, got {prompt!r:.80}")
    return [{"role": _text(message["role"]), "content": _text(message["content"])} for message in messages]


def _text(text: str) -> str:
    """JSON can escape half a character, which no tokenizer takes."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{text!r:.80} is no text: {error.reason} at {error.start}") from error
    return text


def _is_message(message: Any) -> bool:
    return isinstance(message, dict) and all(isinstance(message.get(key), str) for key in ("role", "content"))


def _label(label: Any) -> str:
    if isinstance(label, str) and label.strip():
        return label
    if isinstance(label, int) and not isinstance(label, bool):
        return str(label)
    raise ValueError(f"label must be a text or an integer, got {label!r:.80}")
