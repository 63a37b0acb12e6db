"""Supervised training of the arithmetic model: the start of reinforcement learning.

The demonstrations mix two strategies. A share answers at once with an estimate, which is mostly wrong; the others
write each calculation first, which comes out mostly right. The model learns to do both, in that proportion, so its
sampled accuracy starts near the middle and reinforcement learning has a better strategy to find.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path

import torch
from problems import (
    EVALUATION_PROBLEMS,
    EVALUATION_SEED,
    SHIPPED,
    Problem,
    evaluation_problems,
    operand_set,
    supply,
)
from tokenizer import END, PAD, VOCABULARY, prompt_text
from tokenizer import train as train_tokenizer
from tokenizer import write as write_tokenizer
from tokenizers import Tokenizer
from torch.nn import functional
from transformers import Qwen3Config, Qwen3ForCausalLM

MODEL = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "intermediate_size": 384,
    "hidden_act": "silu",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "max_position_embeddings": 1024,
    "initializer_range": 0.02,
    "tie_word_embeddings": False,
    "use_cache": True,
    "use_sliding_window": False,
    "torch_dtype": "bfloat16",
}
MAX_RESPONSE = 64
IGNORED = -100


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What was asked for; written beside the weights."""

    seed: int
    steps: int
    batch: int
    learning_rate: float
    estimate_share: float
    problems: int
    evaluation_seed: int
    evaluation_problems: int


@dataclass(frozen=True, kw_only=True)
class Accuracy:
    """Shares of responses on the held-out problems: right ones, and those that estimate."""

    sampled: float
    greedy: float
    estimate_share: float
    estimate: float
    worked: float


def encode(problems: list[Problem], estimated: list[bool], tokenizer: Tokenizer) -> tuple[torch.Tensor, torch.Tensor]:
    """Padded token ids and their loss labels, int64 [problems, longest]; only responses carry labels."""
    pad, end = tokenizer.token_to_id(PAD), tokenizer.token_to_id(END)
    prompts = tokenizer.encode_batch([prompt_text(problem.text) for problem in problems])
    chosen = [p.estimate if guess else p.worked for p, guess in zip(problems, estimated, strict=True)]
    responses = tokenizer.encode_batch(chosen)
    pairs = [(p.ids, [*r.ids, end]) for p, r in zip(prompts, responses, strict=True)]
    longest = max(len(prompt) + len(response) for prompt, response in pairs)
    ids = torch.full((len(pairs), longest), pad)
    labels = torch.full((len(pairs), longest), IGNORED)
    for row, (prompt, response) in enumerate(pairs):
        stop = len(prompt) + len(response)
        ids[row, :stop] = torch.tensor(prompt + response)
        labels[row, len(prompt) : stop] = torch.tensor(response)
    return ids, labels


def batches(rows: int, batch: int, steps: int, seed: int) -> Iterator[torch.Tensor]:
    """Row numbers of each step's batch: shuffled epochs, the incomplete last batch of an epoch left out."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.empty(0, dtype=torch.int64)
    for _ in range(steps):
        if len(order) < batch:
            order = torch.randperm(rows, generator=generator)
        yield order[:batch]
        order = order[batch:]


def rate(step: int, settings: Settings) -> float:
    """Linear warm-up over the first twentieth, then a cosine to zero."""
    warm = max(1, settings.steps // 20)
    if step < warm:
        return settings.learning_rate * (step + 1) / warm
    return settings.learning_rate * 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1, settings.steps - warm)))


def train(model: Qwen3ForCausalLM, tokenizer: Tokenizer, settings: Settings, device: torch.device) -> None:
    """Trains in place: fp32 weights, bf16 autocast on a GPU."""
    held_out = operand_set(evaluation_problems(settings.evaluation_seed, settings.evaluation_problems))
    problems = list(islice(supply(settings.seed, held_out), settings.problems))
    rng = random.Random(settings.seed)
    estimated = [rng.random() < settings.estimate_share for _ in problems]
    ids, labels = (tensor.to(device) for tensor in encode(problems, estimated, tokenizer))
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98), weight_decay=0.01)
    for step, rows in enumerate(batches(len(problems), settings.batch, settings.steps, settings.seed)):
        for group in optimizer.param_groups:
            group["lr"] = rate(step, settings)
        rows = rows.to(device)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            logits = model(ids[rows, :-1], use_cache=False).logits
        loss = functional.cross_entropy(logits.flatten(0, 1).float(), labels[rows, 1:].flatten(), ignore_index=IGNORED)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 100 == 0 or step == settings.steps - 1:
            print(f"step {step} loss {loss.item():.4f}", flush=True)


@torch.no_grad()
def respond(model: Qwen3ForCausalLM, tokenizer: Tokenizer, problems: list[Problem], sampled: bool) -> list[str]:
    """One response per problem, at temperature 1 or greedy."""
    pad, end = tokenizer.token_to_id(PAD), tokenizer.token_to_id(END)
    prompts = [encoding.ids for encoding in tokenizer.encode_batch([prompt_text(p.text) for p in problems])]
    width = max(map(len, prompts))
    ids = torch.tensor([[pad] * (width - len(prompt)) + prompt for prompt in prompts], device=model.device)
    output = model.generate(
        ids,
        attention_mask=(ids != pad).long(),
        do_sample=sampled,
        **({"top_k": 0} if sampled else {}),
        max_new_tokens=MAX_RESPONSE,
        eos_token_id=end,
        pad_token_id=pad,
    )
    return list(tokenizer.decode_batch(output[:, width:].tolist()))


def is_right(problem: Problem, response: str) -> bool:
    boxed = re.findall(r"\\boxed\{([^{}]*)\}", response)
    return bool(boxed) and boxed[-1] == str(problem.answer)


def evaluate(model: Qwen3ForCausalLM, tokenizer: Tokenizer, settings: Settings, repeats: int = 4) -> Accuracy:
    """Accuracies on the held-out problems, sampled ones over `repeats` responses each."""
    problems = evaluation_problems(settings.evaluation_seed, settings.evaluation_problems)
    greedy = [is_right(p, r) for p, r in zip(problems, respond(model, tokenizer, problems, False), strict=True)]
    torch.manual_seed(settings.seed)
    right: dict[bool, list[bool]] = {True: [], False: []}
    for _ in range(repeats):
        for problem, response in zip(problems, respond(model, tokenizer, problems, True), strict=True):
            right[response.lstrip().startswith("\\boxed")].append(is_right(problem, response))
    return Accuracy(
        sampled=_mean(right[True] + right[False]),
        greedy=_mean(greedy),
        estimate_share=len(right[True]) / (repeats * len(problems)),
        estimate=_mean(right[True]),
        worked=_mean(right[False]),
    )


def _mean(values: list[bool]) -> float:
    return round(sum(values) / max(1, len(values)), 4)


def write(model: Qwen3ForCausalLM, tokenizer: Tokenizer, settings: Settings, accuracy: Accuracy, out: Path) -> None:
    """Writes the Hugging Face directory and `recipe.json`."""
    model.save_pretrained(out)
    end = tokenizer.token_to_id(END)
    generation = {
        "eos_token_id": end,
        "pad_token_id": tokenizer.token_to_id(PAD),
        "do_sample": True,
        "temperature": 1.0,
    }
    ids = {"eos_token_id": end, "pad_token_id": tokenizer.token_to_id(PAD)}
    recipe = {
        "recipe": "recipes/arithmetic/train.py",
        "settings": asdict(settings),
        "accuracy": asdict(accuracy),
    }
    files = {"config.json": MODEL | ids, "generation_config.json": generation, "recipe.json": recipe}
    for name, content in files.items():
        (out / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    write_tokenizer(tokenizer, out, int(MODEL["max_position_embeddings"]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=SHIPPED / "model", help="directory to write")
    parser.add_argument("--steps", type=int, default=1600, help="training steps")
    parser.add_argument("--batch", type=int, default=512, help="demonstrations per step")
    parser.add_argument("--learning-rate", type=float, default=4e-3, help="peak of the schedule")
    parser.add_argument("--estimate-share", type=float, default=0.57, help="share of demonstrations that estimate")
    parser.add_argument("--problems", type=int, default=150000, help="demonstrations to draw batches from")
    parser.add_argument("--seed", type=int, default=1, help="seed of weights, demonstrations and their order")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cpu or cuda")
    arguments = parser.parse_args()
    settings = Settings(
        seed=arguments.seed,
        steps=arguments.steps,
        batch=arguments.batch,
        learning_rate=arguments.learning_rate,
        estimate_share=arguments.estimate_share,
        problems=arguments.problems,
        evaluation_seed=EVALUATION_SEED,
        evaluation_problems=EVALUATION_PROBLEMS,
    )
    device = torch.device(arguments.device)
    tokenizer = train_tokenizer(seed=3, problems=20000)
    torch.manual_seed(settings.seed)
    model = Qwen3ForCausalLM(Qwen3Config.from_dict(MODEL)).float().to(device)
    train(model, tokenizer, settings, device)
    model.to(torch.bfloat16).eval()
    accuracy = evaluate(model, tokenizer, settings)
    print(accuracy)
    write(model, tokenizer, settings, accuracy, arguments.out)


if __name__ == "__main__":
    main()
