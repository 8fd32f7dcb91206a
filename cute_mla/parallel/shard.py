"""Distribution of keys over ranks: arithmetic on the device, without communication."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from ..ops.arguments import check_integer
from ..ops.paged_cache import MAX_SLOTS
from ..ops.tensor_spec import check_device, check_dtype, check_shape, record_repr, spec_of


class LocalIndices(NamedTuple):
    """Indices of a rank's query tokens into its own cache.

    indices: int32 [batch, s_q, topk], slots of the rank's cache in their original order, then -1.
    topk_length: int32 [batch], most slots of a token of each request.
    """

    indices: torch.Tensor
    topk_length: torch.Tensor

    def __repr__(self) -> str:
        return record_repr(self)


@dataclass(frozen=True)
class ContextShard:
    """One rank's share of the keys of every request: ranks take blocks of `interleave` keys in turn.

    The key at position p of a request is on rank p // interleave % world, where it is the request's key number p // (interleave * world) *
    interleave + p % interleave. A rank stores its keys of a request consecutively, on pages of its own block table. vLLM distributes keys
    in the same way (dcp_kv_cache_interleave_size).

    Methods do not synchronise or read lengths on the host, and can be captured in a CUDA graph. They raise ValueError on bad arguments.
    """

    rank: int
    world: int
    interleave: int = 1

    def __post_init__(self) -> None:
        check_integer("world", self.world, 1)
        check_integer("interleave", self.interleave, 1)
        check_integer("rank", self.rank, 0, self.world - 1)
        if self._round > MAX_SLOTS:
            raise ValueError(f"interleave is {self.interleave} with a world of {self.world}; supported: interleave * world to {MAX_SLOTS}")

    def local_lengths(self, lengths: torch.Tensor) -> torch.Tensor:
        """Return how many keys of requests of these lengths the rank has, with shape and dtype of lengths.

        lengths: int32 or int64 of any shape; negative lengths count as 0.
        """
        check_dtype("lengths", spec_of("lengths", lengths), torch.int32, torch.int64)
        lengths = lengths.clamp(min=0)
        whole = lengths // self._round * self.interleave
        return whole + (lengths % self._round - self.rank * self.interleave).clamp(0, self.interleave)

    def slots(self, positions: torch.Tensor, block_table: torch.Tensor, page_size: int) -> torch.Tensor:
        """Return the slots of keys in the rank's cache, for slot_mapping of write_kv_cache and for indices.

        positions: int32 or int64 [rows, n], positions of keys in their request. block_table: int32 [rows, pages per request], the rank's
        pages of the request of each row. Returns int64 [rows, n]: page * page size + row; -1 for keys of other ranks, negative positions
        and positions beyond the block table.
        """
        check_integer("page_size", page_size, 1, MAX_SLOTS)
        table, keys = spec_of("block_table", block_table), spec_of("positions", positions)
        check_shape("block_table", table, ("rows", "pages per request"))
        check_dtype("block_table", table, torch.int32)
        check_shape("positions", keys, (table.shape[0], "n"), " with this block_table")
        check_dtype("positions", keys, torch.int32, torch.int64)
        check_device("positions", keys, table.device)
        own, local = self.locate(positions.long())
        column = local // page_size
        own = own & (column < table.shape[1])
        if not table.shape[1]:
            return torch.full_like(positions, -1)
        page = block_table.gather(1, column.clamp(0, table.shape[1] - 1)).long()
        return torch.where(own, page * page_size + local % page_size, -1)

    def locate(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return whether keys are on the rank, and their numbers among the request's keys on the rank that has them.

        positions: int32 or int64 of any shape, positions of keys in their request; no rank has those of negative positions. Returns bool
        and the dtype of positions, of the same shape.
        """
        check_dtype("positions", spec_of("positions", positions), torch.int32, torch.int64)
        own = (positions >= 0) & (positions // self.interleave % self.world == self.rank)
        return own, positions // self._round * self.interleave + positions % self.interleave

    def positions(self, local: torch.Tensor) -> torch.Tensor:
        """Return the positions in their request of the rank's own keys, given by their numbers among them; -1 for negative numbers.

        local: int32 or int64 of any shape, whose dtype the result has.
        """
        check_dtype("local", spec_of("local", local), torch.int32, torch.int64)
        block = local // self.interleave * self.world + self.rank
        return torch.where(local < 0, -1, block * self.interleave + local % self.interleave)

    def local_indices(self, positions: torch.Tensor, block_table: torch.Tensor, page_size: int) -> LocalIndices:
        """Return the rank's own keys among those that query tokens select, as slots of its cache, for sparse decode.

        positions: int32 [batch, s_q, topk], positions in the token's request, below its length; negative positions are invalid.
        block_table: int32 [batch, pages per request], the rank's pages. The rank's own slots are moved to the front and topk_length
        excludes all others, so that the kernel does 1 / world of the work.
        """
        spec = spec_of("positions", positions)
        check_shape("positions", spec, ("batch", "s_q", "topk"))
        slots = self.slots(positions.flatten(1), block_table, page_size).view(spec.shape)
        slots = slots.clamp(-1, MAX_SLOTS)  # a page outside the cache stays outside as int32: no cache has so many slots
        others = slots < 0
        order = others.to(torch.uint8).sort(dim=-1, stable=True).indices
        counts = (~others).sum(dim=-1, dtype=torch.int32)
        topk_length = counts.amax(dim=1) if spec.shape[1] else counts.new_zeros(spec.shape[0])
        return LocalIndices(slots.gather(-1, order).int(), topk_length)

    @property
    def _round(self) -> int:
        """Return the number of keys after which the first rank is next again."""
        return self.interleave * self.world
