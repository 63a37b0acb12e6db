"""The merge order of a boundary as a small drawing, made from its constants.

`fold_steps` and `tree_steps` are the orders that are drawn; the tests add numbers up along them and compare with
what the operators give, so that a drawing can't tell another story than the bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from samebits.contract.boundary import Boundary

Step = tuple[tuple[int, int], ...]  # (kept, added): the place that receives, and the place that is added to it

EXAMPLE_SEGMENTS = 4  # how many K segments a drawing shows; a run has its own number


def fold_steps(lanes: int) -> tuple[Step, ...]:
    """Folding in halves: in each step the upper half of the lanes is added onto the lower half."""
    steps = []
    while lanes > 1:
        lanes //= 2
        steps.append(tuple((lane, lane + lanes) for lane in range(lanes)))
    return tuple(steps)


def tree_steps(segments: int) -> tuple[Step, ...]:
    """A balanced tree over neighbours: in each step every other partial sum is added onto the one before it."""
    steps = []
    reach = 1
    while reach < segments:
        steps.append(tuple((at, at + reach) for at in range(0, segments, 2 * reach)))
        reach *= 2
    return tuple(steps)


def drawing(boundary: Boundary) -> str:
    """Lines of text without a final newline; empty for a boundary that has no drawing."""
    draw = _DRAWINGS.get(boundary.name)
    return "\n".join(line.rstrip() for line in draw(boundary)) if draw else ""


def lanes(count: int, element: str) -> list[str]:
    """Lanes that each take every `count`-th element, and how they fold."""
    names = [f"lane {lane}" for lane in (0, 1, count - 1)]
    width = max(map(len, names))
    rows = [
        f"{name:>{width}}   +0 ─ {element}[{lane}] ─ {element}[{lane + count}] ─ {element}[{lane + 2 * count}] ─ …"
        for name, lane in zip(names, (0, 1, count - 1), strict=True)
    ]
    return [*rows[:2], f"{'…':>{width}}", rows[2], "", *fold(count, "lane")]


def fold(count: int, what: str) -> list[str]:
    """One line per step of folding `count` partial sums in halves."""
    lines = []
    for step in fold_steps(count):
        (low, other), (last, _) = step[0], step[-1]
        who = f"{what} j + {what} j+{other - low}   for j = {low} … {last}" if last else f"{what} 0 + {what} 1"
        lines.append(f"fold {2 * len(step):>{len(str(count))}} to {len(step):<{len(str(count))}}   {who}")
    return lines


def tree(leaves: Sequence[str], root: str) -> list[str]:
    """A balanced binary tree over neighbouring leaves, drawn from left to right."""
    width = max(map(len, leaves))
    lines = [
        f"{leaves[row // 2]:{width}} " if row % 2 == 0 else " " * (width + 1) for row in range(2 * len(leaves) - 1)
    ]
    places = {leaf: 2 * leaf for leaf in range(len(leaves))}
    for step in tree_steps(len(leaves)):
        block = [" " * 7] * len(lines)
        for kept, added in step:
            top, bottom = places[kept], places.pop(added)
            middle = (top + bottom) // 2
            for row in range(top, bottom + 1):
                block[row] = "  │    "
            block[top], block[middle], block[bottom] = "──┐    ", "  ├─ + ", "──┘    "
            places[kept] = middle
        lines = [line + part for line, part in zip(lines, block, strict=True)]
    lines[places[0]] += root
    return lines


def chunks(tile: int, chunk: int) -> list[str]:
    """Tiles inside chunks, and how the states of chunks merge."""
    lines = []
    for number in range(3):
        first, last = number * chunk, (number + 1) * chunk - 1
        steps = [f"{first}–{first + tile - 1}"]
        if chunk > 2 * tile:
            steps += [f"{first + tile}–{first + 2 * tile - 1}", "…"]
        if chunk > tile:
            steps.append(f"{last - tile + 1}–{last}")
        lines.append((f"chunk {number}", f"keys {first}–{last}", f"empty ─ {' ─ '.join(steps)} ─ state {number}"))
    widths = [max(len(line[column]) for line in lines) for column in (0, 1)]
    return [
        *(f"{name:{widths[0]}}   {keys:{widths[1]}}   {rest}" for name, keys, rest in lines),
        "",
        "state 0 ─ merge state 1 ─ merge state 2 ─ … ─ out = acc / l",
        "",
        f"row sum of one tile, {tile} values p:",
        *(f"  {line}" for line in fold(tile, "p")),
    ]


def windows(bits: int, count: int) -> list[str]:
    """Windows of exponents: which are kept, and how two states align."""
    top = 1
    shown = [top - at for at in range(count + 1)]
    cells = [f"{window * bits}…{window * bits + bits - 1}" for window in shown]
    width = max(map(len, cells)) + 2
    sums = [f"s{at}" for at in range(count)]

    def row(title: str, values: Sequence[str]) -> str:
        return f"{title:26}" + "".join(f"{value:^{width}}" for value in values)

    return [
        row("exponent i of a term", cells),
        row(f"window floor(i / {bits})", [str(window) for window in shown]),
        row(f"kept, highest seen is {top}", [*sums, "dropped"]),
        "",
        row("merge: a state with top 1", sums),
        row("       a state with top 0", ["", *sums[:-1], f"({sums[-1]} dropped)"]),
        row("       integer sums", ["+"] * count),
        "",
        f"S = {_horner(sums, bits)}; the sums are integers: no order can show",
    ]


def _horner(sums: Sequence[str], bits: int) -> str:
    text = sums[0]
    for at, name in enumerate(sums[1:]):
        text = f"({text}) 2^{bits} + {name}" if at else f"{text} 2^{bits} + {name}"
    return text


def _chain(title: str, over: str, *, start: str = "+0", last: str) -> str:
    terms = " ─ ".join(f"{over}={at}" for at in (0, 1, 2))
    return f"{title:8}   {start} ─ {terms} ─ … ─ {last}"


def _linear(boundary: Boundary) -> list[str]:
    return [
        f"K cut into S = {EXAMPLE_SEGMENTS} segments s0, s1, … here; a run states its own S",
        "",
        "a segment   +0 ─ its first k ─ the next k ─ … ─ its last k",
        "",
        *tree([f"s{at}" for at in range(EXAMPLE_SEGMENTS)], "── + bias ── one rounding ── y"),
        "",
        "a rank of a tensor-parallel group holds neighbouring segments: a subtree",
    ]


def _linear_gradient(boundary: Boundary) -> list[str]:
    return [
        _chain("dx[m, k]", "n", last="one rounding"),
        _chain("dw[n, k]", "m", start="buffer", last="buffer"),
        _chain("dbias[n]", "m", start="buffer", last="buffer"),
    ]


def _attention_backward(boundary: Boundary) -> list[str]:
    return [
        _chain("dQ row i", "j", last="+ (+0) ─ times scale ─ one rounding"),
        _chain("dK row j", "i", last="+ (+0) ─ times scale ─ one rounding"),
        _chain("dV row j", "i", last="+ (+0) ─ one rounding"),
        "           (for each row i the heads of the group, ascending)",
        "",
        "D = the dot of dO and O:",
        *(f"  {line}" for line in lanes(int(boundary.constants["lanes"]), "dO·O")),
    ]


def _sample_support(boundary: Boundary) -> list[str]:
    return [
        "order of the ids   largest z, lowest id ─ … ─ smallest z, highest id        (-inf: nowhere)",
        "term                t0 ─ t1 ─ t2 ─ … ─ t(n-1) │ below min_p t0               min-p leaves n",
        "                    t0 ─ … ─ t(k-1)           │ after k ids                  top-k leaves k ≤ n",
        "                    t0 ─ … ─ t(j-1)           │ t0 + … + t(j-1) reaches need  top-p leaves j ≤ k",
        "",
        f"need = ceil(S F / 2^{boundary.constants['mass_bits']}),  S = t0 + … + t(k-1),  "
        f"F = floor(top_p 2^{boundary.constants['mass_bits']})",
    ]


def _rms_norm_backward(boundary: Boundary) -> list[str]:
    return [
        *lanes(int(boundary.constants["lanes"]), "g·x"),
        "",
        "c ── scale ── scale ── / W ── k;   dx = one rounding of (g - x k) scale (+ dsum)",
        "",
        _chain("dw[i]", "r", start="buffer", last="buffer"),
    ]


def _swiglu_backward(boundary: Boundary) -> list[str]:
    return [
        "dy ──┐",
        "     ├─ · ──┐",
        "u ───┘      ├─ · ──┐",
        "s ──────────┘      ├─ · ── one rounding ── dg",
        "1 + g (1 - s) ─────┘",
        "",
        "g ──┐",
        "    ├─ · ──┐",
        "s ──┘      ├─ · ── one rounding ── du",
        "dy ────────┘",
    ]


def _logprob_backward(boundary: Boundary) -> list[str]:
    return [
        "z ── − lse ── · log2e ── exp2 ── p;   dz = one rounding of upstream (onehot − p) / temperature",
        "",
        _chain("dhidden", "v", last="fp32"),
        _chain("dw[v]", "t", start="buffer", last="buffer"),
        _chain("dbias[v]", "t", start="buffer", last="buffer"),
    ]


def _sample(boundary: Boundary) -> list[str]:
    return [
        "id                 0          1                2          …",
        "term              t0         t1               t2          …",
        "running total   [0, t0)  [t0, t0+t1)  [t0+t1, t0+t1+t2)   …   S",
        "                                 ↑",
        f"         r = floor(S R / 2^{boundary.constants['draw_bits']}): the id whose interval holds r",
        "",
        *windows(int(boundary.constants["window_bits"]), int(boundary.constants["windows"]))[:3],
    ]


_DRAWINGS: dict[str, Callable[[Boundary], list[str]]] = {
    "embedding": lambda boundary: ["weight[id, :] ── copy ── y[:]      nothing is summed"],
    "rms_norm": lambda boundary: [
        *lanes(int(boundary.constants["lanes"]), "x²"),
        "",
        "sum ── / W ── + eps ── sqrt ── 1 / … ── scale;   y = one rounding of (x scale) weight",
    ],
    "linear": _linear,
    "rotary": lambda boundary: [
        "x1 cos ──┐",
        "         ├─ − ── one rounding ── y1",
        "x2 sin ──┘",
        "",
        "x2 cos ──┐",
        "         ├─ + ── one rounding ── y2",
        "x1 sin ──┘",
    ],
    "attention": lambda boundary: chunks(int(boundary.constants["tile"]), int(boundary.constants["chunk"])),
    "swiglu": lambda boundary: [
        "g ── sigmoid ──┐",
        "               ├─ · ──┐",
        "g ─────────────┘      ├─ · ── one rounding ── y",
        "u ────────────────────┘",
    ],
    "logprob": lambda boundary: windows(int(boundary.constants["window_bits"]), int(boundary.constants["windows"])),
    "sample_support": _sample_support,
    "sample": _sample,
    "linear_gradient": _linear_gradient,
    "embedding_backward": lambda boundary: [_chain("dw[id]", "t", start="buffer", last="buffer, t of this id only")],
    "rms_norm_backward": _rms_norm_backward,
    "rotary_backward": lambda boundary: [
        "dy1 cos ────┐",
        "            ├─ − ── one rounding ── dx1",
        "dy2 (-sin) ─┘",
        "",
        "dy2 cos ────┐",
        "            ├─ + ── one rounding ── dx2",
        "dy1 (-sin) ─┘",
    ],
    "swiglu_backward": _swiglu_backward,
    "logprob_backward": _logprob_backward,
    "attention_backward": _attention_backward,
}
