"""Prompts: reading, refusing, chat templates, the order of steps; and the problems that are shipped."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

import samebits
from samebits.rl.chat import ChatTokenizer
from samebits.rl.prompts import PromptSet

PRESET = Path(samebits.__file__).parent / "presets" / "arithmetic"
ROOT = Path(__file__).parents[2]
Messages = Sequence[dict[str, str]]


class Letters:
    """A tokenizer whose ids are code points."""

    def encode(self, messages: Messages) -> tuple[int, ...]:
        return tuple(ord(letter) for message in messages for letter in message["content"])


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str], Path]:
    def to_file(text: str) -> Path:
        path = tmp_path / "problems.jsonl"
        path.write_text(text, encoding="utf-8")
        return path

    return to_file


@pytest.fixture(scope="module")
def tokenizer() -> ChatTokenizer:
    return ChatTokenizer(PRESET / "model")


def numbered(count: int) -> str:
    return "".join(json.dumps({"prompt": f"p{i}", "label": i}) + "\n" for i in range(count))


def test_both_shapes_of_a_prompt_are_read(write: Callable[[str], Path]) -> None:
    path = write(
        '{"prompt": "ab", "label": "1", "extra": null}\n'
        '{"prompt": [{"role": "system", "content": "x"}, {"role": "user", "content": "yz"}], "label": 2}'
    )
    first, second = sorted(PromptSet(path, Letters()).batch(0, 2, 0), key=lambda prompt: prompt.index)
    assert (first.index, first.token_ids, first.label, first.text) == (0, (97, 98), "1", "ab")
    assert (second.index, second.token_ids, second.label, second.text) == (1, (120, 121, 122), "2", "yz")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "not valid JSON"),
        ("", "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
        ("[1]", "a JSON list, want an object"),
        ('{"question": "a", "label": "1"}', "no prompt; the line has question, label"),
        ('{"prompt": "a"}', "no label; the line has prompt"),
        ("{}", "no prompt and no label; the line has no keys"),
        ('{"prompt": 5, "label": "1"}', "prompt must be a text or a list of messages .* got 5"),
        ('{"prompt": [], "label": "1"}', "prompt must be"),
        ('{"prompt": [{"role": "user"}], "label": "1"}', "prompt must be"),
        ('{"prompt": "a", "label": null}', "label must be a text or an integer, got None"),
        ('{"prompt": "a", "label": true}', "label must be"),
        ('{"prompt": "a", "label": " "}', "label must be"),
    ],
)
def test_a_bad_line_is_named(write: Callable[[str], Path], line: str, message: str) -> None:
    path = write('{"prompt": "a", "label": "1"}\n' + line + "\n" + '{"prompt": "a", "label": "1"}\n')
    with pytest.raises(ValueError, match=rf"{re.escape(str(path))}, line 2: {message}"):
        PromptSet(path, Letters())


def test_bytes_that_are_no_text_are_named(tmp_path: Path) -> None:
    path = tmp_path / "problems.jsonl"
    path.write_bytes(b'{"prompt": "\xff", "label": "1"}\n')
    with pytest.raises(ValueError, match="line 1: not valid JSON"):
        PromptSet(path, Letters())


def test_half_a_character_is_named(write: Callable[[str], Path]) -> None:
    with pytest.raises(ValueError, match=r"line 1: .*ud800.* is no text: surrogates not allowed at 2"):
        PromptSet(write('{"prompt": "a \\ud800", "label": "1"}\n'), Letters())


def test_an_empty_or_missing_file_is_named(write: Callable[[str], Path], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"problems\.jsonl holds no problems"):
        PromptSet(write(""), Letters())
    with pytest.raises(ValueError, match=r"cannot read the problems .*absent\.jsonl: No such file"):
        PromptSet(tmp_path / "absent.jsonl", Letters())


def test_long_prompts_are_dropped_and_counted(write: Callable[[str], Path]) -> None:
    path = write('{"prompt": "abc", "label": "1"}\n{"prompt": "ab", "label": "2"}\n')
    prompts = PromptSet(path, Letters(), max_prompt_length=2)
    assert (len(prompts), prompts.dropped) == (1, 1)
    assert prompts.batch(0, 1, 0)[0].index == 1
    with pytest.raises(ValueError, match="the shortest of 2 prompts has 2 tokens, more than the 1"):
        PromptSet(path, Letters(), max_prompt_length=1)


def test_an_epoch_visits_every_prompt_once(write: Callable[[str], Path]) -> None:
    prompts = PromptSet(write(numbered(24)), Letters())
    epochs = [[p.index for step in range(start, start + 6) for p in prompts.batch(step, 4, 7)] for start in (0, 6)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(24))] * 2
    assert epochs[0] != epochs[1]


def test_no_batch_holds_a_prompt_twice(write: Callable[[str], Path]) -> None:
    prompts = PromptSet(write(numbered(10)), Letters())
    for step in range(40):
        assert len({prompt.index for prompt in prompts.batch(step, 4, 1)}) == 4


def test_the_order_depends_on_the_seed_alone(write: Callable[[str], Path]) -> None:
    path = write(numbered(50))
    steps = [3, 0, 17, 3]
    batches = [[PromptSet(path, Letters()).batch(step, 8, 5) for step in order] for order in (steps, steps[::-1])]
    assert batches[0] == batches[1][::-1]
    assert batches[0][0] == batches[0][3]
    assert PromptSet(path, Letters()).batch(3, 8, 6) != batches[0][0]
    # The order is part of what a seed means: this line may only change with a new major version.
    assert [p.index for p in PromptSet(path, Letters()).batch(0, 4, 1234)] == [47, 28, 14, 36]


def test_impossible_batches_are_refused(write: Callable[[str], Path]) -> None:
    prompts = PromptSet(write(numbered(3)), Letters())
    with pytest.raises(ValueError, match="a batch of 4 prompts was asked for; want 1 to 3"):
        prompts.batch(0, 4, 0)
    with pytest.raises(ValueError, match="want 1 to 3"):
        prompts.batch(0, 0, 0)
    with pytest.raises(ValueError, match="step must not be negative, got -1"):
        prompts.batch(-1, 1, 0)


def test_the_light_chat_tokenizer_agrees_with_transformers(tokenizer: ChatTokenizer) -> None:
    from transformers import AutoTokenizer

    whole = AutoTokenizer.from_pretrained(PRESET / "model")
    conversations = [
        [{"role": "user", "content": "What is 3 + 40 - 5?"}],
        [{"role": "system", "content": "Be\nshort. "}, {"role": "user", "content": "héllo <b>'\"&</b> 日本 007"}],
    ]
    for messages in conversations:
        ids = whole.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        assert tokenizer.encode(messages) == tuple(ids)
    answer = "47+38=85. \\boxed{85}"
    assert tokenizer.decode([*whole.encode(answer), whole.eos_token_id]) == answer


def test_digits_are_tokens_of_their_own(tokenizer: ChatTokenizer) -> None:
    vocabulary = json.loads((PRESET / "model" / "tokenizer.json").read_text())["model"]["vocab"]
    assert len(vocabulary) == 512
    assert sorted(token for token in vocabulary if re.search(r"\d", token)) == list("0123456789")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "tokenizer.json").write_bytes((PRESET / "model" / "tokenizer.json").read_bytes())
    return tmp_path


def test_a_model_without_a_template_takes_one_text(model: Path) -> None:
    plain = ChatTokenizer(model)
    assert plain.decode(plain.encode([{"role": "user", "content": "Find 3 x 4."}])) == "Find 3 x 4."
    with pytest.raises(ValueError, match="has no chat template"):
        plain.encode([{"role": "system", "content": "a"}, {"role": "user", "content": "b"}])


def test_a_template_file_goes_before_the_configuration(model: Path) -> None:
    (model / "tokenizer_config.json").write_text(
        json.dumps({"chat_template": "old", "eos_token": {"content": "<|im_end|>"}})
    )
    (model / "chat_template.jinja").write_text("{{ messages[0].content }}{{ eos_token }}")
    assert ChatTokenizer(model).render([{"role": "user", "content": "hi"}]) == "hi<|im_end|>"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('only users') }}", "refuses the messages: only users"),
        ("{{ messages.__class__.__mro__ }}", "refuses the messages"),
        ("{% if %}", "the chat template is malformed"),
        (["a"], "chat_template must be one template, got list"),
    ],
)
def test_bad_templates_are_named(model: Path, template: object, message: str) -> None:
    (model / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    with pytest.raises(ValueError, match=message):
        ChatTokenizer(model).encode([{"role": "user", "content": "hi"}])


def test_missing_and_malformed_tokenizers_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"tokenizer\.json does not exist"):
        ChatTokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer\.json is not a tokenizer"):
        ChatTokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("[]")
    with pytest.raises(ValueError, match=r"tokenizer_config\.json holds list"):
        ChatTokenizer(tmp_path)


def shipped(name: str) -> list[tuple[str, str]]:
    records = [json.loads(line) for line in (PRESET / name).read_text(encoding="utf-8").splitlines()]
    return [(record["prompt"][0]["content"], record["label"]) for record in records]


def test_shipped_problems_are_many_and_held_out(tokenizer: ChatTokenizer) -> None:
    training, evaluation = shipped("prompts.jsonl"), shipped("eval.jsonl")
    assert len(training) >= 5000
    assert len(evaluation) == 500

    def operands(problems: list[tuple[str, str]]) -> set[tuple[str, ...]]:
        return {tuple(re.findall(r"\d+", text)) for text, _ in problems}

    assert len(operands(training)) == len(training)
    assert len(operands(evaluation)) == len(evaluation)
    assert not operands(training) & operands(evaluation)
    assert not {text for text, _ in training} & {text for text, _ in evaluation}
    lengths = [len(p.token_ids) for p in PromptSet(PRESET / "prompts.jsonl", tokenizer).batch(0, 6000, 0)]
    assert max(lengths) <= 48


def test_shipped_problems_are_what_the_recipe_writes(tmp_path: Path) -> None:
    recipe = ROOT / "recipes" / "arithmetic" / "problems.py"
    subprocess.run([sys.executable, recipe, "--out", tmp_path], check=True, capture_output=True)
    for name in ("prompts.jsonl", "eval.jsonl"):
        assert (tmp_path / name).read_bytes() == (PRESET / name).read_bytes()


def test_shipped_files_are_small_and_readable() -> None:
    files = [path for path in PRESET.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 8_000_000
    accuracy = json.loads((PRESET / "model" / "recipe.json").read_text())["accuracy"]
    assert 0.40 <= accuracy["sampled"] <= 0.55
    assert accuracy["worked"] >= 0.93
