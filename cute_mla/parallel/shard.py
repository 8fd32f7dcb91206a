"""Which rank holds which key of a request, and where: arithmetic on the device, without communication."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from ..ops.arguments import check_integer
from ..ops.tensor_spec import check_device, check_dtype, check_shape, spec_of


class LocalIndices(NamedTuple):
    """What a rank's query tokens attend to in its own cache.

    indices: int32 [batch, s_q, topk], slots of the rank's cache, its own ones in front in the order they had, -1 behind them.
    topk_length: int32 [batch], the most that a token of each request has.
    """

    indices: torch.Tensor
    topk_length: torch.Tensor


@dataclass(frozen=True)
class ContextShard:
    """One rank's share of the keys of every request: blocks of `interleave` keys are dealt to the ranks in turn.

    The key at position p of a request is on rank p // interleave % world, where it is the request's key number p // (interleave * world) *
    interleave + p % interleave. A rank keeps the keys that it has of a request one behind the other, on pages of its own block table. vLLM
    deals the same way (dcp_kv_cache_interleave_size).

    Nothing here synchronises or reads lengths on the host; all of it can be captured in a CUDA graph. ValueError on bad arguments.
    """

    rank: int
    world: int
    interleave: int = 1

    def __post_init__(self) -> None:
        check_integer("world", self.world, 1)
        check_integer("interleave", self.interleave, 1)
        check_integer("rank", self.rank, 0, self.world - 1)

    def local_lengths(self, lengths: torch.Tensor) -> torch.Tensor:
        """How many keys of requests of these lengths the rank has. lengths: int32 or int64 of any shape, negative ones counting as 0;
        the result is like them."""
        check_dtype("lengths", spec_of("lengths", lengths), torch.int32, torch.int64)
        lengths = lengths.clamp(min=0)
        whole = lengths // self._round * self.interleave
        return whole + (lengths % self._round - self.rank * self.interleave).clamp(0, self.interleave)

    def slots(self, positions: torch.Tensor, block_table: torch.Tensor, page_size: int) -> torch.Tensor:
        """Where keys lie in the rank's cache: for writing them (write_kv_cache, slot_mapping) and for naming them.

        positions: int32 or int64 [rows, n], of keys in their request. block_table: int32 [rows, pages per request], the rank's pages of the
        request of each row. Returns int64 [rows, n]: page * page size + row; -1 where another rank has the key, where the position is
        negative, or where the table has no room for it.
        """
        check_integer("page_size", page_size, 1)
        table, wanted = spec_of("block_table", block_table), spec_of("positions", positions)
        check_shape("block_table", table, ("rows", "pages per request"))
        check_dtype("block_table", table, torch.int32)
        check_shape("positions", wanted, (table.shape[0], "n"), " with this block_table")
        check_dtype("positions", wanted, torch.int32, torch.int64)
        check_device("positions", wanted, table.device)
        positions = positions.long()
        local = positions // self._round * self.interleave + positions % self.interleave
        column = local // page_size
        own = (positions >= 0) & (positions // self.interleave % self.world == self.rank) & (column < table.shape[1])
        if not table.shape[1]:
            return torch.full_like(positions, -1)
        page = block_table.gather(1, column.clamp(0, table.shape[1] - 1)).long()
        return torch.where(own, page * page_size + local % page_size, -1)

    def local_indices(self, positions: torch.Tensor, block_table: torch.Tensor, page_size: int) -> LocalIndices:
        """Sparse decode: of the keys that query tokens choose, the rank's own, as slots of its cache.

        positions: int32 [batch, s_q, topk], in the token's request and below its length; a negative one names nothing. block_table: int32
        [batch, pages per request], the rank's. Keys of other ranks are moved behind the rank's own and left out by topk_length, so that
        the kernel does one world-th of the work and not all of it.
        """
        spec = spec_of("positions", positions)
        check_shape("positions", spec, ("batch", "s_q", "topk"))
        slots = self.slots(positions.flatten(1), block_table, page_size).view(spec.shape)
        others = slots < 0
        order = others.to(torch.uint8).sort(dim=-1, stable=True).indices
        counts = (~others).sum(dim=-1, dtype=torch.int32)
        most = counts.amax(dim=1) if spec.shape[1] else counts.new_zeros(spec.shape[0])
        return LocalIndices(slots.gather(-1, order).int(), most)

    @property
    def _round(self) -> int:
        """Keys that are dealt until it is the first rank's turn again."""
        return self.interleave * self.world
