"""The three answers, and the exit code of each."""

from __future__ import annotations

from enum import Enum


class Verdict(Enum):
    """same: all compared tokens have equal bits. different: some differ. cannot tell: no proof either way."""

    SAME = "same"
    DIFFERENT = "different"
    CANNOT_TELL = "cannot tell"

    @property
    def exit_code(self) -> int:
        return {"same": 0, "different": 1, "cannot tell": 2}[self.value]


def judge(compared_tokens: int, mismatch_count: int, nonfinite_count: int) -> Verdict:
    """The verdict over counts. Nothing compared, or only values that are not numbers, is no agreement."""
    if compared_tokens <= 0:
        return Verdict.CANNOT_TELL
    if mismatch_count > 0:
        return Verdict.DIFFERENT
    return Verdict.CANNOT_TELL if nonfinite_count > 0 else Verdict.SAME
