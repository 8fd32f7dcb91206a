"""Decode over keys that are dealt to the ranks of a process group: every rank attends to its own, and states are merged by their lse."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from ..api import flash_mla_with_kvcache, merge_states
from ..ops.arguments import check_integer
from ..ops.split_plan import MlaSchedule
from ..ops.tensor_spec import check_device, check_dtype, check_shape, spec_of
from ..spec.mla import D_V
from .shard import ContextShard, LocalIndices

# Columns of 16 bits of a state as it travels: out, then lse as fp32, then nothing up to a multiple of 16 bytes, so that the decode kernel
# writes whole vectors.
STATE_COLUMNS = D_V + 8
_LSE_COLUMN = D_V // 2  # in fp32 columns


@dataclass(frozen=True)
class ShardedRequests:
    """What a rank has of the requests of a step, for all layers of it: ContextParallel.plan makes it.

    block_table: int32 [rows, pages per request], the rank's. cache_seqlens: int32 [rows], the rank's keys of each row. s_q: query tokens of
    a request. rows_of_request: 1, or s_q where every query token is a row of its own.
    """

    block_table: torch.Tensor
    cache_seqlens: torch.Tensor
    s_q: int
    rows_of_request: int
    schedule: MlaSchedule = field(default_factory=MlaSchedule)

    @property
    def batch(self) -> int:
        """Requests."""
        return self.cache_seqlens.shape[0] // self.rows_of_request


class ContextParallel:
    """Decode of one rank among those of a process group, each of which holds a share of the keys of every request.

    group: of torch.distributed, the default one if None: NCCL for CUDA tensors, gloo for CPU tensors. interleave: keys that are dealt to a
    rank at a time; see ContextShard. The heads are divided among the ranks as tensor parallelism divides them: a rank brings the queries
    of its own heads and gets the results of these.

        context = ContextParallel(group, interleave=64)
        slots = context.shard.slots(positions, block_table, page_size)          # where new keys go: -1 if not here
        step = context.plan(cache_seqlens, block_table, s_q, causal=True)       # once per step, for all layers
        out, lse = context.decode(q, k_cache, step)                             # every layer, on every rank

    A call gathers the queries of all heads (all-gather), attends to the rank's own keys with all of them, sends every rank the states of
    its heads (all-to-all), and merges these. For n = batch * s_q * h_q of a rank, and w ranks, a rank receives

        queries     (w - 1) * n * 1,152 bytes (e4m3: 576)
        states      (w - 1) * n * 1,040 bytes: out in 16 bits and lse

    Scaling by the lse of all ranks and a reduce-scatter would be (w - 1) * n * (1,024 + 4 w) bytes in two collectives, one after the other,
    and sums in 16 bits in an order that is the transport's. An all-gather of all states would be (w - 1) * w * n * 1,028 bytes.

    The same inputs give the same bits, run after run, whichever rank is ready first: states are merged in the order of ranks, in fp32. With
    batch_invariant=True the bits of a request depend on no batchmate; they do depend on the number of ranks and on interleave.

    ValueError if torch.distributed is not initialised or this process not in the group. Calls raise what flash_mla_with_kvcache raises; a
    rank that raises leaves the others waiting.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, interleave: int = 1) -> None:
        if not dist.is_available() or not dist.is_initialized():
            raise ValueError("torch.distributed is not initialised; supported: ContextParallel after init_process_group")
        rank = dist.get_rank(group)
        if rank < 0:
            raise ValueError("this process is not in the group; supported: a group of which it is a member")
        self.group = group
        self.shard = ContextShard(rank, dist.get_world_size(group), interleave)

    def plan(self, cache_seqlens: torch.Tensor, block_table: torch.Tensor, s_q: int = 1, causal: bool = False) -> ShardedRequests:
        """What this rank has of the requests of a step. No communication, no synchronisation.

        cache_seqlens: int32 [batch], keys of each request on all ranks together, the new tokens' included. block_table: int32 [batch, pages
        per request], the rank's own pages. s_q: query tokens of each request. causal: as in flash_mla_with_kvcache, aligned bottom right.

        How many of the rank's keys a token sees differs from token to token by what other ranks hold of the newest keys, which no alignment
        of s_q rows says. Causal query tokens are therefore requests of their own, with lengths of their own, and the rank's keys are read
        s_q times.
        """
        check_integer("s_q", s_q, 1)
        lengths, table = spec_of("cache_seqlens", cache_seqlens), spec_of("block_table", block_table)
        check_shape("cache_seqlens", lengths, ("batch",))
        check_dtype("cache_seqlens", lengths, torch.int32)
        check_shape("block_table", table, (lengths.shape[0], "pages per request"))
        check_device("block_table", table, lengths.device)
        if s_q == 1 or not causal:
            return ShardedRequests(block_table, self.shard.local_lengths(cache_seqlens), s_q, 1)
        unseen = torch.arange(s_q - 1, -1, -1, dtype=torch.int32, device=lengths.device)
        seen = self.shard.local_lengths(cache_seqlens.unsqueeze(1) - unseen)
        return ShardedRequests(block_table.repeat_interleave(s_q, dim=0), seen.flatten(), s_q, s_q)

    def decode(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        requests: ShardedRequests,
        *,
        softmax_scale: float | None = None,
        descale_q: torch.Tensor | None = None,
        descale_k: torch.Tensor | None = None,
        batch_invariant: bool = False,
        empty_lse: float = math.inf,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Dense decode over the keys of all ranks. Every rank of the group calls it, with equally many requests, tokens and heads.

        q: [batch, s_q, h_q, 576], of this rank's heads; all ranks' heads together are 1 to 128. k_cache: the rank's own. Both, and the
        options, as flash_mla_with_kvcache has them (descale_q and descale_k: the same on all ranks). requests: of plan().

        Returns out [batch, s_q, h_q, 512] and lse fp32 [batch, h_q, s_q] of this rank's heads, over all keys: a token that attends to
        nothing on any rank has out 0 and lse empty_lse. A rank may have no keys of a request.
        """
        spec = spec_of("q", q)
        check_shape("q", spec, (requests.batch, requests.s_q, "h_q", "d_qk"), " with these requests")
        options = {"descale_q": descale_q, "descale_k": descale_k, "softmax_scale": softmax_scale, "batch_invariant": batch_invariant}
        planned = (requests.block_table, requests.cache_seqlens, D_V, requests.schedule)
        return self._attend(q, requests.rows_of_request, empty_lse, k_cache, planned, options)

    def sparse_decode(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        selected: LocalIndices,
        *,
        softmax_scale: float | None = None,
        attn_sink: torch.Tensor | None = None,
        batch_invariant: bool = False,
        empty_lse: float = math.inf,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Sparse decode over the keys of all ranks. Every rank of the group calls it, with equally many requests, tokens and heads.

        q: [batch, s_q, h_q, d_qk], of this rank's heads. k_cache: the rank's own, of any format of sparse decode. selected: of
        shard.local_indices, for the same choice of keys on every rank. attn_sink: fp32 [h_q], of this rank's heads; it counts once. The
        rest, and what is returned: as decode.
        """
        spec = spec_of("q", q)
        check_shape("q", spec, (*spec_of("indices", selected.indices).shape[:2], "h_q", "d_qk"), " with these indices")
        if attn_sink is not None:
            sink = spec_of("attn_sink", attn_sink)
            check_shape("attn_sink", sink, (spec.shape[2],))
            check_dtype("attn_sink", sink, torch.float32)
            check_device("attn_sink", sink, spec.device)
        options = {
            "softmax_scale": softmax_scale,
            "batch_invariant": batch_invariant,
            "is_fp8_kvcache": spec_of("k_cache", k_cache).dtype.itemsize == 1,
            "indices": selected.indices,
            "topk_length": selected.topk_length,
        }
        out, lse = self._attend(q, 1, empty_lse, k_cache, (None, None, D_V, MlaSchedule()), options)
        if attn_sink is not None:
            rows = lse.transpose(1, 2)
            share = torch.sigmoid(rows - attn_sink).masked_fill(rows.isinf(), 0.0)  # out of an empty row is 0, whatever the sink
            out.mul_(share.unsqueeze(-1))
        return out, lse

    def _attend(
        self,
        q: torch.Tensor,
        rows_of_request: int,
        empty_lse: float,
        k_cache: torch.Tensor,
        planned: tuple[Any, ...],
        options: dict[str, Any],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Out and lse of the rank's heads over all ranks' keys. planned, options: positional and other arguments of the decode."""
        batch, s_q, own_heads, d_qk = q.shape
        rows, tokens, heads = batch * rows_of_request, s_q // rows_of_request, own_heads * self.shard.world
        queries = self._of_all_heads(q).view(heads, rows, tokens, d_qk).permute(1, 2, 0, 3)
        states = q.new_empty((heads, rows, tokens, STATE_COLUMNS), dtype=torch.bfloat16 if q.element_size() == 1 else q.dtype)
        out, lse = _parts(states)
        flash_mla_with_kvcache(queries, k_cache, *planned, out=out.permute(1, 2, 0, 3), lse=lse.transpose(0, 1), **options)
        mine = self._of_own_heads(states).view(self.shard.world, own_heads, batch, s_q, STATE_COLUMNS)
        outs, lses = _parts(mine)
        result = states.new_empty((batch, s_q, own_heads, D_V))
        result_lse = states.new_empty((batch, own_heads, s_q), dtype=torch.float32)
        of_ranks = outs.permute(0, 2, 3, 1, 4), lses.permute(0, 2, 3, 1)
        merge_states(*of_ranks, out=result, lse=result_lse.transpose(1, 2), empty_lse=empty_lse)
        return result, result_lse

    def _of_all_heads(self, q: torch.Tensor) -> torch.Tensor:
        """[heads of all ranks, batch, s_q, d_qk], contiguous. Copies q only if it does not lie so (as a batched product over heads leaves
        it)."""
        own = q.permute(2, 0, 1, 3).contiguous()
        if self.shard.world == 1:
            return own
        gathered = own.new_empty((self.shard.world * own.shape[0], *own.shape[1:]))
        dist.all_gather_into_tensor(gathered.view(torch.uint8), own.view(torch.uint8), group=self.group)
        return gathered

    def _of_own_heads(self, states: torch.Tensor) -> torch.Tensor:
        """From the states of all heads over this rank's keys, those of its own heads over the keys of each rank, rank by rank."""
        if self.shard.world == 1:
            return states
        received = torch.empty_like(states)
        dist.all_to_all_single(received.view(torch.uint8), states.view(torch.uint8), group=self.group)
        return received


def _parts(states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Out [.., 512] and lse fp32 [..] of states [.., STATE_COLUMNS]."""
    return states[..., :D_V], states.view(torch.float32)[..., _LSE_COLUMN]
