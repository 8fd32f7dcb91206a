"""split_plan: divides the key tiles of a batch into parts of equal cost, on the device.

Requests stay whole where parts of the same greatest cost can hold them so; else part boundaries cut them.

The plan is a table int32 [num_parts, 8] (FlashMLA's tile_scheduler_metadata) and a prefix sum int32 [batch + 1]
(num_splits). A part handles the key tiles from (begin_req, begin_tile) up to, not including, (end_req, end_tile); between
them lie whole requests. A request cut by k part boundaries has k + 1 splits; an uncut one has none and writes its output
directly. num_splits[r] is the first row of the accumulators that request r uses.

A plan is never wrong, only less balanced: the parts of a request cover all its tiles whatever its length has become,
since the last part of a request runs to its actual end (PART_END_OPEN) and the others clip their tiles to it.

Requests may have different numbers of query tokens (RaggedQueries). What the plan cuts are then work units, in place of requests. A unit
is up to unit_tokens neighbouring query tokens of one request, with that request's keys. The plan's table of units lies behind its parts.
Units without tokens fill it up; no part has them.

With an attention window, tiles of which no query token sees a key are skipped: a request counts as long as the others are, and its
tiles are numbered without them (visible_keys).

A plan does not depend on whether its calls are batch invariant. A batch-invariant call rounds every cut down to a multiple of
INVARIANT_SPLIT_TILES, cuts requests at all those multiples, and counts accumulator rows itself; it ignores num_splits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from .abi import Int32, Pointer, params_of
from .arch import SM120, Arch
from .mla import ceil_div

TILE_KEYS = 64  # keys of one tile, the unit of the plan
NO_LIMIT = (1 << 31) - 1  # keys of a request, as max_keys, and keys that a window reaches

PLAN_COLUMNS = 8
PART_BEGIN_REQ = 0
PART_END_REQ = 1  # inclusive; a part without work has begin_req == batch
PART_BEGIN_TILE = 2
PART_END_TILE = 3  # exclusive, of end_req
PART_BEGIN_SPLIT = 4  # index among the splits of begin_req of the part's first piece
PART_FIRST_IS_SPLIT = 5
PART_LAST_IS_SPLIT = 6
PART_END_OPEN = 7  # 1: this part owns the tail of end_req, whatever its length

UNIT_COLUMNS = 8  # of a row of the table of units
UNIT_REQUEST = 0
UNIT_FIRST_TOKEN = 1  # among those of all requests
UNIT_TOKENS = 2  # 0: not a unit
UNIT_ALL_TOKENS = 3  # query tokens of its request
UNIT_LATER = 4  # those of them that follow the unit
UNIT_BASE = 5  # UNIT_FIRST_TOKEN less the tokens that the unit lacks

PIECE_OVERHEAD_TILES = 3  # cost of starting a request, in key tiles
DRAM_OVERHEAD_TILES = 1  # the same where a tile takes as long as a start, since it waits for the DRAM of RTX boards
# Average costs of requests above which parts of whole ones may exceed their share by a tile more than the cost of a start: a cut costs
# accumulators and combine, too. Of short requests a part would else get one more and leave another without.
MORE_SLACK_ABOVE = (8, 16)
# Where a CTA alone has a part and waits for HBM, whole requests that leave SMs idle take as long as cut ones, and combine has nothing to
# merge: the other SMs get the bytes of the idle ones, up to 1.3 times their own.
ALONE_WHOLE_EIGHTHS = 2
MAX_PARTS = 1024
MOST_WHOLE_REQUESTS = 1024  # a plan for more requests cuts them; the cuts are few beside so many requests

INVARIANT_SPLIT_TILES = 128  # a batch-invariant call cuts a request every 8,192 keys, and nowhere else
# The same, and what combine does, as a term of an order (spec/orders.py)
INVARIANT_SPLIT = f"every {INVARIANT_SPLIT_TILES * TILE_KEYS} keys, merged in fp32, ascending"


class SplitPlanArguments(NamedTuple):
    """Launch arguments of split_plan, in ABI order: the one list that host, launch and kernel share."""

    lengths: Pointer  # int32 [batch]: keys of each request, taken for 0 if negative; or null: max_keys each
    extra_lengths: Pointer  # int32 [batch]: keys in a second cache, which follow; or null: extra_max_keys each
    plan: Pointer  # int32 [num_parts, 8], out
    num_splits: Pointer  # int32 [batch + 1], out
    cu_seqlens_q: Pointer  # int32 [requests + 1]: query tokens of all requests before each; or null: every request is a unit
    units: Pointer  # int32 [batch, 8], out: the table of units; or null: every query token is a unit, with a length of its own
    batch: Int32
    num_parts: Int32
    max_keys: Int32  # more count as that many; NO_LIMIT for any number
    extra_max_keys: Int32  # 0 without a second cache. The sum of both is an int32
    # requests with different numbers of query tokens, as in RaggedQueries; batch is then the room for units
    requests: Int32
    total_q: Int32
    max_seqlen_q: Int32
    unit_tokens: Int32  # 1 or more
    reach: Int32  # keys before the end of a request that windows reach; NO_LIMIT without a window
    sink_tiles: Int32  # tiles at the beginning of a request that count in spite of that
    whole_eighths: Int32  # of a part's share, by which parts of whole requests may exceed it; at least whole_slack in any case


PARAMS = params_of(SplitPlanArguments)


@dataclass(frozen=True)
class RaggedQueries:
    """Query tokens of requests that may have different numbers of them, packed one request behind the other.

    requests: number of requests. total_q: room for query tokens; how many there are is in device memory. max_seqlen_q: most of a request.
    unit_tokens: most of a work unit; 0 if every query token is a unit and needs no entry in a table.
    """

    requests: int
    total_q: int
    max_seqlen_q: int
    unit_tokens: int = 0

    @property
    def units(self) -> int:
        """Return the most units: a request with n tokens has ceil(n / unit_tokens)."""
        if not self.unit_tokens:
            return self.total_q
        rounded_up = min(self.requests, self.total_q) * (self.unit_tokens - 1)
        return min(self.requests * ceil_div(self.max_seqlen_q, self.unit_tokens), (self.total_q + rounded_up) // self.unit_tokens)

    @property
    def table_rows(self) -> int:
        """Return the rows of the table of units."""
        return self.units if self.unit_tokens else 0


@dataclass(frozen=True)
class SplitPlanConfig:
    """The only variant of split_plan."""

    @property
    def name(self) -> str:
        """The kernel's name in the manifest, without op and arch."""
        return "i32"


class KeyWindow(NamedTuple):
    """The keys of a request that an attention window leaves visible, for any of its query tokens.

    reach: keys before the end; NO_LIMIT: all. sink_keys: keys at the beginning.
    """

    reach: int = NO_LIMIT
    sink_keys: int = 0

    @property
    def sink_tiles(self) -> int:
        """Tiles at the beginning that hold a visible key."""
        return ceil_div(self.sink_keys, TILE_KEYS)

    def skipped_tiles(self, length: int) -> int:
        """Return the tiles of a request of `length` keys that hold no visible key. They follow the sink tiles."""
        return max(max(length - self.reach, 0) // TILE_KEYS - self.sink_tiles, 0)

    def visible_keys(self, length: int) -> int:
        """Return the keys of a request of `length` keys without those of skipped tiles."""
        return length - TILE_KEYS * self.skipped_tiles(length)


NO_WINDOW = KeyWindow()


def invariant_splits(max_keys: int) -> int:
    """Return the splits of a request of at most max_keys keys in a batch-invariant call; at least 1."""
    return max(ceil_div(ceil_div(max_keys, TILE_KEYS), INVARIANT_SPLIT_TILES), 1)


def piece_overhead(arch: Arch) -> int:
    """Return the cost of starting a request in an architecture's plans, in key tiles."""
    return DRAM_OVERHEAD_TILES if arch == SM120 else PIECE_OVERHEAD_TILES


def whole_slack(total: int, batch: int, overhead: int = PIECE_OVERHEAD_TILES) -> int:
    """Return the tiles by which parts of whole requests may exceed their share. total: cost of all requests, in tiles."""
    return overhead + sum(total > batch * cost for cost in MORE_SLACK_ABOVE)


def keeps_whole(batch: int, keys: int, num_parts: int, overhead: int = PIECE_OVERHEAD_TILES) -> bool:
    """Return whether the plan for requests of `keys` keys each cuts none of them, because parts can hold them whole."""
    cost = max(ceil_div(keys, TILE_KEYS), 1) + overhead
    most = ceil_div(batch * cost, num_parts) + whole_slack(batch * cost, batch, overhead)
    return batch <= min(num_parts * (most // cost), MOST_WHOLE_REQUESTS)


def accumulator_rows(batch: int, num_parts: int, max_splits: int = 0) -> int:
    """Return the most rows of the split accumulators that a call can need. max_splits: invariant_splits(), or 0 where the plan cuts.

    Each of a plan's num_parts - 1 boundaries cuts one request, and a request cut k times has k + 1 <= 2 k splits.
    """
    if max_splits:
        return batch * max_splits if max_splits > 1 else 0
    return min(2 * (num_parts - 1), batch + num_parts - 1)
