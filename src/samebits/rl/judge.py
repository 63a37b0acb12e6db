"""The process behind the reward: reads `[answer, label]` lines, writes `1` or `0` for each.

Run by `samebits.rl.reward`. It holds its memory, so that a huge number costs an answer and not the machine.
"""

from __future__ import annotations

import json
import logging
import resource
import sys
from functools import lru_cache
from typing import Any

from math_verify import parse, verify

SECONDS = 5
MEMORY = 4 << 30


def is_equal(answer: str, label: str) -> bool:
    """math-verify's verdict; an answer it cannot read or compare in time is not equal."""
    expected, found = _parsed(label), _parsed(answer)
    return bool(expected and found) and bool(verify(expected, found, timeout_seconds=SECONDS))


@lru_cache(maxsize=4096)
def _parsed(text: str) -> list[Any]:
    # Both sides stand in a box, so that math-verify reads both by the same rules.
    return list(parse(f"\\boxed{{{text}}}", parsing_timeout=SECONDS))


def main() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    # The caller reports what it gives up on; math-verify's own lines would only repeat it.
    logging.disable(logging.CRITICAL)
    print("ready", flush=True)
    for line in sys.stdin:
        answer, label = json.loads(line)
        print(int(is_equal(answer, label)), flush=True)


if __name__ == "__main__":
    main()
