"""Launch of a kernel as the clock needs it: its CTAs, the work of each of them, bytes, products, and what follows in the call."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .partition import CtaWork


class NoLaunchError(ValueError):
    """Row whose launch cannot be predicted; the message is the reason."""


@dataclass(frozen=True)
class Combine:
    """A combine launch, or another kernel that only streams.

    ctas: of the grid. ctas_per_sm: resident at a time. bytes: moved by all CTAs.
    cold: the bytes come from memory; otherwise the kernel before may have left them in L2.
    lookups, merges: of the busiest CTA of combine: rounds that look up query tokens, and tokens that it merges. splits: of such a token.
    heads: rows of a query token that a CTA merges. columns: CTAs that share a row's columns.
    """

    ctas: int
    ctas_per_sm: int
    bytes: float
    cold: bool = False
    lookups: int = 1
    merges: int = 0
    splits: int = 0
    heads: int = 1
    columns: int = 1


@dataclass(frozen=True)
class Launch:
    """A launch of one kernel over keys, and what follows it in the call: a combine or another streaming kernel, or a launch over keys.

    kernel: name in the manifest. flops: padded FLOP of a block of keys by product, as 16-bit equivalents.
    cta_work: work of each group of CTAs that share keys. row_ctas: CTAs that share the same keys and have different query rows.
    ctas: CTAs that run at the same time. bytes: device memory traffic.
    rows: query rows of a cluster of decode, 0 for other launches.
    rounds: how often the launch, and what follows it, is made in a call, one time after the other.
    """

    kernel: str
    flops: Mapping[str, float]
    cta_work: tuple[CtaWork, ...]
    row_ctas: int
    ctas: int
    bytes: float
    combine: Combine | None = None
    after: Launch | None = None
    rows: int = 0
    rounds: int = 1
