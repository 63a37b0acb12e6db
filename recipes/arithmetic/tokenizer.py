"""Trains the byte-level BPE of the arithmetic model on the recipe's own problems and writes its two files.

Digits are always tokens of their own, so a number of n digits costs n tokens wherever it stands.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from problems import SHIPPED, supply
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

VOCABULARY = 512
END_OF_TEXT, START, END, PAD = SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>")
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"
)


def train(seed: int, problems: int) -> Tokenizer:
    """The tokenizer, exactly `VOCABULARY` entries with the special tokens as ids 0 to 3."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_corpus(seed, problems), trainer)
    if tokenizer.get_vocab_size() != VOCABULARY:
        raise ValueError(
            f"the corpus gives {tokenizer.get_vocab_size()} entries, wanted {VOCABULARY}: use more problems"
        )
    return tokenizer


def write(tokenizer: Tokenizer, directory: Path, max_length: int) -> None:
    """Writes `tokenizer.json` and `tokenizer_config.json` as transformers and vLLM read them."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_length,
        "eos_token": END,
        "pad_token": PAD,
        "additional_special_tokens": [END_OF_TEXT, START],
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def prompt_text(content: str) -> str:
    """What the chat template makes of one user message, with the assistant's turn opened."""
    return f"{START}user\n{content}{END}\n{START}assistant\n"


def _corpus(seed: int, problems: int) -> Iterator[str]:
    for problem in islice(supply(seed), problems):
        yield from ("user\n", problem.text, "assistant\n", problem.worked, "system\n")


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the arithmetic model's tokenizer.")
    parser.add_argument("--out", type=Path, default=SHIPPED / "model", help="directory for the tokenizer's files")
    parser.add_argument("--problems", type=int, default=20000, help="problems in the corpus")
    parser.add_argument("--max-length", type=int, default=1024, help="the model's longest sequence")
    parser.add_argument("--seed", type=int, default=3, help="seed of the corpus")
    arguments = parser.parse_args()
    write(train(arguments.seed, arguments.problems), arguments.out, arguments.max_length)
    print(f"tokenizer of {VOCABULARY} entries in {arguments.out}")


if __name__ == "__main__":
    main()
