"""Finding the first site that differs, also where a side could not be looked into."""

from __future__ import annotations

from samebits.locate.search import coverage, first_divergence
from samebits.trace import Point, SideTrace, Token, sites

ORDER = sites(2, qk_norm=True, tied=False)


def trace(wrong: Point | None = None, index: int = 3, missing: tuple[str, ...] = (), after: bool = True) -> SideTrace:
    """Every point of every site, over 8 tokens; from `wrong` on all that follows differs from token `index` on."""
    side = SideTrace()
    seen = False
    for point in (point for site in ORDER for point in site.writes):
        seen = seen or point == wrong
        side.dtypes[point] = "bfloat16"
        differs = point == wrong or (seen and after)
        side.digests[point] = {Token(0, i): i + 100 * (differs and i >= index) for i in range(8)}
    for point in list(side.digests):
        if point.name in missing:
            del side.digests[point]
    return side


def test_equal_traces_agree() -> None:
    assert first_divergence(trace(), trace(), ORDER) is None
    assert coverage(trace(), trace(), ORDER).tokens == 8


def test_every_site_is_found_at_its_token() -> None:
    for site in ORDER:
        for point in site.writes:
            found = first_divergence(trace(), trace(point, index=5), ORDER)
            assert found is not None
            assert (found.site, found.token, found.tokens, found.region) == (site, Token(0, 5), 3, (site,))


def test_what_could_not_be_seen_is_part_of_the_region() -> None:
    hidden = trace(missing=("keys", "values"))
    found = first_divergence(hidden, trace(Point(1, "keys")), ORDER)
    assert found is not None
    assert [str(site) for site in found.region] == ["KV cache of layer 1", "attention of layer 1"]
    inside = tuple({point.name for site in ORDER[:-3] for point in site.writes})
    found = first_divergence(trace(missing=inside), trace(Point(1, "gate")), ORDER)
    assert found is not None
    assert found.site.name == "LM head"
    assert found.region == tuple(ORDER[:-1])


def test_other_types_differ_whatever_their_digests() -> None:
    other = trace()
    other.dtypes[Point(2, "logits")] = "float32"
    found = first_divergence(trace(), other, ORDER)
    assert found is not None
    assert (found.site.name, found.tokens) == ("LM head", 8)


def test_points_of_one_side_alone_are_named() -> None:
    seen = coverage(trace(missing=("mixed",)), trace(), ORDER)
    assert seen.missing == (Point(0, "mixed"), Point(1, "mixed"))
    nothing = coverage(SideTrace(), trace(), ORDER)
    assert (nothing.points, nothing.tokens) == (0, 0)
