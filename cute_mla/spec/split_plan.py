"""split_plan: divides the key tiles of a batch into parts of equal cost, on the device.

Requests stay whole where parts of the same greatest cost can hold them so; else part boundaries cut them.

The plan is a table int32 [num_parts, 8] (FlashMLA's tile_scheduler_metadata) and a prefix sum int32 [batch + 1]
(num_splits). A part handles the key tiles from (begin_req, begin_tile) up to, not including, (end_req, end_tile); between
them lie whole requests. A request cut by k part boundaries has k + 1 splits; an uncut one has none and writes its output
directly. num_splits[r] is the first row of the accumulators that request r uses.

A plan is never wrong, only less balanced: the parts of a request cover all its tiles whatever its length has become,
since the last part of a request runs to its actual end (PART_END_OPEN) and the others clip their tiles to it.

A plan does not depend on whether its calls are batch invariant. A batch-invariant call rounds every cut down to a multiple of
INVARIANT_SPLIT_TILES, cuts requests at all those multiples, and counts accumulator rows itself; it ignores num_splits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from .abi import Int32, Pointer, params_of
from .mla import ceil_div

TILE_KEYS = 64  # keys of one tile, the unit of the plan
NO_LIMIT = (1 << 31) - 1  # keys of a request, as max_keys

PLAN_COLUMNS = 8
PART_BEGIN_REQ = 0
PART_END_REQ = 1  # inclusive; a part without work has begin_req == batch
PART_BEGIN_TILE = 2
PART_END_TILE = 3  # exclusive, of end_req
PART_BEGIN_SPLIT = 4  # index among the splits of begin_req of the part's first piece
PART_FIRST_IS_SPLIT = 5
PART_LAST_IS_SPLIT = 6
PART_END_OPEN = 7  # 1: this part owns the tail of end_req, whatever its length

PIECE_OVERHEAD_TILES = 5  # cost of starting a request, in key tiles (FlashMLA's fixed_overhead_num_blocks)
MAX_PARTS = 1024
MOST_WHOLE_REQUESTS = 1024  # a plan for more requests cuts them; the cuts are few beside so many requests

INVARIANT_SPLIT_TILES = 128  # a batch-invariant call cuts a request every 8,192 keys, and nowhere else


class SplitPlanArguments(NamedTuple):
    """Launch arguments of split_plan, in ABI order: the one list that host, launch and kernel share."""

    lengths: Pointer  # int32 [batch]: keys of each request, taken for 0 if negative; or null: max_keys each
    extra_lengths: Pointer  # int32 [batch]: keys in a second cache, which follow; or null: extra_max_keys each
    plan: Pointer  # int32 [num_parts, 8], out
    num_splits: Pointer  # int32 [batch + 1], out
    batch: Int32
    num_parts: Int32
    max_keys: Int32  # more count as that many; NO_LIMIT for any number
    extra_max_keys: Int32  # 0 without a second cache. The sum of both is an int32


PARAMS = params_of(SplitPlanArguments)


@dataclass(frozen=True)
class SplitPlanConfig:
    """The only variant of split_plan."""

    @property
    def name(self) -> str:
        """The kernel's name in the manifest, without op and arch."""
        return "i32"


def invariant_splits(max_keys: int) -> int:
    """Return the splits of a request of at most max_keys keys in a batch-invariant call; at least 1."""
    return max(ceil_div(ceil_div(max_keys, TILE_KEYS), INVARIANT_SPLIT_TILES), 1)


def accumulator_rows(batch: int, num_parts: int, max_splits: int = 0) -> int:
    """Return the most rows of the split accumulators that a call can need. max_splits: invariant_splits(), or 0 where the plan cuts.

    Each of a plan's num_parts - 1 boundaries cuts one request, and a request cut k times has k + 1 <= 2 k splits.
    """
    if max_splits:
        return batch * max_splits if max_splits > 1 else 0
    return min(2 * (num_parts - 1), batch + num_parts - 1)
