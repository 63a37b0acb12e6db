"""Arithmetic word and number problems of two or three steps, and the two ways to answer them.

Run as a script it writes the shipped prompt files; imported, it gives the training recipe its supply of
problems. Standard library only: the same seed gives the same files on every machine.
"""

from __future__ import annotations

import argparse
import json
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

LARGEST_VALUE = 199
EVALUATION_SEED = 20260
EVALUATION_PROBLEMS = 500
SHIPPED = Path(__file__).resolve().parents[2] / "src" / "samebits" / "presets" / "arithmetic"

NAMES = [
    "Ada", "Ali", "Amy", "Ana", "Ben", "Bob", "Dan", "Ella", "Emma", "Eva", "Hana", "Ian", "Jack", "Kim",
    "Leo", "Lily", "Mia", "Noah", "Omar", "Rosa", "Sam", "Tom", "Uma", "Zoe",
]  # fmt: skip
ITEMS = [
    "apples", "balls", "beads", "books", "bells", "cakes", "cards", "coins", "cups", "eggs", "hats", "keys",
    "lemons", "masks", "nuts", "pears", "pens", "plums", "rings", "roses", "shells", "stamps", "stars",
    "toys",
]  # fmt: skip
PLACES = ["bakery", "farm", "garden", "market", "school", "shop", "store"]

# A plan lists steps of three characters: operand, operation, operand. Letters are numbers of the problem,
# digits are the results of earlier steps. `x` is multiplication.
NUMBER_TEMPLATES: tuple[tuple[str, str], ...] = (
    ("Compute {a} + {b} - {c}.", "a+b 1-c"),
    ("Compute {a} - {b} + {c}.", "a-b 1+c"),
    ("What is {a} + {b} + {c}?", "a+b 1+c"),
    ("What is {a} - {b} - {c}?", "a-b 1-c"),
    ("Find {a} x {b} + {c}.", "axb 1+c"),
    ("Find {a} x {b} - {c}.", "axb 1-c"),
    ("Evaluate {a} + {b} x {c}.", "bxc a+1"),
    ("Evaluate {a} - {b} x {c}.", "bxc a-1"),
    ("Add {a} and {b}, then take away {c}.", "a+b 1-c"),
    ("Take {b} from {a}, then add {c}.", "a-b 1+c"),
    ("Multiply {a} by {b}, then add {c}.", "axb 1+c"),
    ("Compute {a} + {b} - {c} + {d}.", "a+b 1-c 2+d"),
    ("What is {a} - {b} + {c} - {d}?", "a-b 1+c 2-d"),
    ("Find {a} x {b} + {c} - {d}.", "axb 1+c 2-d"),
    ("Evaluate {a} x {b} + {c} x {d}.", "axb cxd 1+2"),
)
WORD_TEMPLATES: tuple[tuple[str, str], ...] = (
    ("{name} has {a} {item}, buys {b} and gives away {c}. How many are left?", "a+b 1-c"),
    ("{name} had {a} {item}, lost {b} and sold {c}. How many are left?", "a-b 1-c"),
    ("{name} finds {a} {item}, {other} finds {b}. They sell {c} of them. How many are left?", "a+b 1-c"),
    ("There are {a} red, {b} blue and {c} green {item}. How many in all?", "a+b 1+c"),
    ("The {place} had {a} {item}, sold {b} and got {c} more. How many now?", "a-b 1+c"),
    ("{name} packs {a} bags of {b} {item} and has {c} more. How many {item}?", "axb 1+c"),
    ("{name} fills {a} jars with {b} {item} each and drops {c}. How many are left?", "axb 1-c"),
    ("{name} has {a} {item} and {b} bags of {c} more. How many {item}?", "bxc a+1"),
    ("{name} had {a} {item} and used {b} each day for {c} days. How many are left?", "bxc a-1"),
    ("{name} read {b} pages, then {c} pages, of a book of {a}. How many remain?", "a-b 1-c"),
    ("A bus has {a} people. {b} get on, {c} get off, then {d} get on. How many now?", "a+b 1-c 2+d"),
    ("The {place} had {a} {item}. It sold {b}, got {c} and sold {d}. How many are left?", "a-b 1+c 2-d"),
    ("{name} has {a} bags of {b} {item}, gets {c} and loses {d}. How many {item}?", "axb 1+c 2-d"),
    ("The {place} has {a} rows of {b} {item} and {c} rows of {d}. How many {item}?", "axb cxd 1+2"),
)


@dataclass(frozen=True)
class Problem:
    """A problem's text, the calculations that solve it in order (`47+38=85`), and its answer."""

    text: str
    steps: tuple[str, ...]
    answer: int

    @property
    def operands(self) -> tuple[int, ...]:
        """The numbers of the text, in the order they are read."""
        return tuple(int(number) for number in re.findall(r"\d+", self.text))

    @property
    def estimate(self) -> str:
        """The response that answers at once, to the nearest ten: right for about one problem in nine."""
        return _boxed((self.answer + 5) // 10 * 10)

    @property
    def worked(self) -> str:
        """The response that writes each calculation before it answers."""
        return " ".join(f"{step}." for step in self.steps) + " " + _boxed(self.answer)

    def record(self) -> dict[str, object]:
        """The problem in the JSON shape of dapo-math-17k."""
        return {"prompt": [{"role": "user", "content": self.text}], "label": str(self.answer)}


def draw(rng: random.Random) -> Problem:
    """One problem. Operands are at least 2; every intermediate value lies between 0 and 199."""
    template, plan = rng.choice(rng.choice((NUMBER_TEMPLATES, WORD_TEMPLATES)))
    words = {"name": rng.choice(NAMES), "item": rng.choice(ITEMS), "place": rng.choice(PLACES)}
    words["other"] = rng.choice([name for name in NAMES if name != words["name"]])
    while True:
        numbers = _draw_numbers(plan, rng)
        solved = _solve(plan, numbers)
        if solved is not None:
            steps, answer = solved
            return Problem(template.format(**words, **numbers), steps, answer)


def supply(seed: int, without: frozenset[tuple[int, ...]] = frozenset()) -> Iterator[Problem]:
    """Endless problems for a seed; those with one of the operand tuples `without` are left out."""
    rng = random.Random(seed)
    while True:
        problem = draw(rng)
        if problem.operands not in without:
            yield problem


def distinct(problems: Iterator[Problem], count: int) -> list[Problem]:
    """The first `count` problems that share neither text nor operands with an earlier one."""
    chosen: list[Problem] = []
    seen: set[tuple[int, ...]] = set()
    while len(chosen) < count:
        problem = next(problems)
        if problem.operands not in seen:
            seen.add(problem.operands)
            chosen.append(problem)
    return chosen


def evaluation_problems(seed: int, count: int) -> list[Problem]:
    return distinct(supply(seed), count)


def operand_set(problems: list[Problem]) -> frozenset[tuple[int, ...]]:
    return frozenset(problem.operands for problem in problems)


def write_jsonl(path: Path, problems: list[Problem]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = (json.dumps(problem.record()) for problem in problems)
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def _boxed(value: int) -> str:
    return f"\\boxed{{{value}}}"


def _draw_numbers(plan: str, rng: random.Random) -> dict[str, int]:
    factors = {letter for step in plan.split() if step[1] == "x" for letter in (step[0], step[2])}
    letters = sorted(set(plan) & set("abcd"))
    return {letter: rng.randint(2, 12 if letter in factors else 99) for letter in letters}


def _solve(plan: str, numbers: dict[str, int]) -> tuple[tuple[str, ...], int] | None:
    """The written steps and the answer, or None when a value leaves the allowed range."""
    known = dict(numbers)
    steps: list[str] = []
    value = 0
    for index, (left, operation, right) in enumerate(plan.split(), start=1):
        x, y = known[left], known[right]
        value = {"+": x + y, "-": x - y, "x": x * y}[operation]
        if not 0 <= value <= LARGEST_VALUE:
            return None
        known[str(index)] = value
        steps.append(f"{x}{operation}{y}={value}")
    return tuple(steps), value


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the arithmetic prompts and the held-out evaluation problems.")
    parser.add_argument("--out", type=Path, default=SHIPPED, help="directory for prompts.jsonl and eval.jsonl")
    parser.add_argument("--prompts", type=int, default=6000, help="number of training prompts")
    parser.add_argument("--evaluation", type=int, default=EVALUATION_PROBLEMS, help="number of held-out problems")
    parser.add_argument(
        "--seed", type=int, default=EVALUATION_SEED, help="seed; the held-out problems use it, the prompts the next"
    )
    arguments = parser.parse_args()
    held_out = evaluation_problems(arguments.seed, arguments.evaluation)
    prompts = distinct(supply(arguments.seed + 1, operand_set(held_out)), arguments.prompts)
    write_jsonl(arguments.out / "eval.jsonl", held_out)
    write_jsonl(arguments.out / "prompts.jsonl", prompts)
    print(f"{len(prompts)} prompts and {len(held_out)} held-out problems in {arguments.out}")


if __name__ == "__main__":
    main()
