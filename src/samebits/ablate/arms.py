"""Arms of an ablation: which case each module runs. Standard library only."""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Iterable
from dataclasses import dataclass

from samebits.contract.routes import CASES, MODULES

_DIGITS = {"P/P": "0", "R/R": "1"}


@dataclass(frozen=True)
class Arm:
    """One case per module, in the order of MODULES."""

    cases: tuple[str, str, str]

    @property
    def name(self) -> str:
        """M101 where each module is native or strict on both sides, else those that are not R/R; also a file name."""
        if set(self.cases) <= set(_DIGITS):
            return "M" + "".join(_DIGITS[case] for case in self.cases)
        return ",".join(
            f"{module}={case.replace('/', '')}" for module, case in self.by_module().items() if case != "R/R"
        )

    @property
    def is_strict(self) -> bool:
        """Whether every module goes the samebits route on both sides."""
        return set(self.cases) == {"R/R"}

    @property
    def is_native_rollout(self) -> bool:
        """Whether the rollout side runs nothing but its own code."""
        return all(case.endswith("/P") for case in self.cases)

    def by_module(self) -> dict[str, str]:
        return dict(zip(MODULES, self.cases, strict=True))


def module_arms() -> list[Arm]:
    """M000 to M111, the native one first and the strict one last."""
    return [Arm(cases) for cases in itertools.product(("P/P", "R/R"), repeat=3)]  # type: ignore[arg-type]


def case_arms(module: str) -> list[Arm]:
    """The four cases of one module while the others stay R/R. Raises ValueError for an unknown module."""
    if module not in MODULES:
        raise ValueError(f"no module {module!r}; known: {', '.join(MODULES)}")
    return [parse_arm(f"{module}={case}") for case in sorted(CASES)]


def parse_arm(text: str) -> Arm:
    """M101, or attention=P/R,logp=R/R where modules left out are R/R; also an arm's `name`.

    Raises ValueError that says what is wrong.
    """
    if text[:1] in ("M", "m") and "=" not in text:
        arms = {arm.name: arm for arm in module_arms()}
        if text.upper() not in arms:
            raise ValueError(f"no arm {text!r}: want M and a 0 or 1 for each of {', '.join(MODULES)}, such as M101")
        return arms[text.upper()]
    cases: dict[str, str] = {}
    for part in text.split(","):
        module, sign, case = part.partition("=")
        if not sign or module not in MODULES:
            close = difflib.get_close_matches(module, MODULES, n=1, cutoff=0.5)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise ValueError(f"no arm {text!r}: want M101 or MODULE=CASE with a module of {', '.join(MODULES)}{hint}")
        if module in cases:
            raise ValueError(f"arm {text!r}: {module} stands there more than once")
        case = case if "/" in case else f"{case[:1]}/{case[1:]}"
        if case not in CASES:
            raise ValueError(f"arm {text!r}: no case {case!r}; known: {', '.join(CASES)}")
        cases[module] = case
    return Arm(tuple(cases.get(module, "R/R") for module in MODULES))  # type: ignore[arg-type]


def arms_of(named: Iterable[str], modules: Iterable[str]) -> list[Arm]:
    """The arms of one ablation, each once: those named (M000 to M111 where none is), and the cases of `modules`."""
    chosen = [parse_arm(text) for text in named] or module_arms()
    chosen += [arm for module in modules for arm in case_arms(module)]
    return list(dict.fromkeys(chosen))
