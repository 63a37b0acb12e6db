"""The first site, in model order, that wrote other bits on two sides while everything that it read was the same."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from samebits.trace import Point, SideTrace, Site, Token
from samebits.trace.points import ASKED


@dataclass(frozen=True, kw_only=True)
class Divergence:
    """`site` wrote other bits at `points`, first at `token`; `tokens` of `compared` tokens differ there.

    `region` are the sites that may be the cause: the site itself and, where a side could not be looked into, those
    before it whose outputs were not recorded.
    """

    site: Site
    points: tuple[Point, ...]
    token: Token
    tokens: int
    compared: int
    region: tuple[Site, ...]


@dataclass(frozen=True, kw_only=True)
class Coverage:
    """How much was compared: points of both sides, tokens over all points, and the points that one side lacks."""

    points: int
    tokens: int
    missing: tuple[Point, ...]


def differing(left: SideTrace, right: SideTrace, point: Point) -> tuple[list[Token], int]:
    """The tokens whose digests or dtypes differ at a point, in order, and how many were compared."""
    a, b = left.digests.get(point, {}), right.digests.get(point, {})
    both = a.keys() & b.keys()
    if left.dtypes.get(point) != right.dtypes.get(point):
        return sorted(both), len(both)
    return sorted(token for token in both if a[token] != b[token]), len(both)


def first_divergence(left: SideTrace, right: SideTrace, order: Sequence[Site]) -> Divergence | None:
    """None where all that was recorded on both sides agrees."""
    producers = {point: site for site in order for point in site.writes}
    for site in order:
        found = {point: differing(left, right, point) for point in site.writes}
        wrong = {point: tokens for point, (tokens, _) in found.items() if tokens}
        if wrong:
            token = min(tokens[0] for tokens in wrong.values())
            return Divergence(
                site=site,
                points=tuple(point for point, tokens in wrong.items() if token in tokens),
                token=token,
                tokens=len(set().union(*wrong.values())),
                compared=max(count for _, count in found.values()),
                region=tuple(sorted(_region(site, left, right, producers), key=order.index)),
            )
    return None


def _region(site: Site, left: SideTrace, right: SideTrace, producers: Mapping[Point, Site]) -> list[Site]:
    """The site and, for what it read that was not compared, the sites that wrote that, and so on."""
    found = [site]
    for one in found:
        for point in one.reads:
            unseen = point not in ASKED and not differing(left, right, point)[1]
            if unseen and producers[point] not in found:
                found.append(producers[point])
    return found


def coverage(left: SideTrace, right: SideTrace, order: Iterable[Site]) -> Coverage:
    """What first_divergence could look at."""
    points = [point for site in order for point in site.writes]
    counts = {point: differing(left, right, point)[1] for point in points}
    return Coverage(
        points=sum(count > 0 for count in counts.values()),
        tokens=max(counts.values(), default=0),
        missing=tuple(point for point, count in counts.items() if not count),
    )
