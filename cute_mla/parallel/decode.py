"""Decode over keys distributed over a process group: every rank attends to its own keys, and the states are merged by their lse."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from ..api import flash_mla_with_kvcache, merge_states
from ..ops.arguments import check_flag, check_integer, short_repr
from ..ops.limits import MAX_QUERY_TOKENS
from ..ops.paged_cache import check_requests
from ..ops.split_plan import MlaSchedule
from ..ops.tensor_spec import check_counts, check_device, check_dtype, check_shape, record_repr, spec_of
from ..spec.mla import D_V
from .choice import best_of, own_topk
from .shard import ContextShard, LocalIndices

# 16-bit columns of a state in transfers: out, then lse as fp32, then padding to a multiple of 16 bytes, so that the decode kernel stores
# whole vectors.
STATE_COLUMNS = D_V + 8
_LSE_COLUMN = D_V // 2  # in fp32 columns


@dataclass(frozen=True)
class ShardedRequests:
    """A rank's share of the requests of a step, for all layers; made by ContextParallel.plan.

    block_table: int32 [rows, pages per request], the rank's pages. cache_seqlens: int32 [rows], the rank's keys per row. s_q: query tokens
    per request. rows_of_request: 1, or s_q if every query token is a row of its own. packed: whether query tokens are packed, each a row
    and a request of its own.
    """

    block_table: torch.Tensor
    cache_seqlens: torch.Tensor
    s_q: int
    rows_of_request: int
    packed: bool = False
    schedule: MlaSchedule = field(default_factory=MlaSchedule)

    @property
    def batch(self) -> int:
        """Return the number of requests."""
        return self.cache_seqlens.shape[0] // self.rows_of_request

    __repr__ = record_repr


class ContextParallel:
    """Decode on one rank of a process group in which each rank holds a share of the keys of every request.

    group: a process group of torch.distributed, None for the default group; NCCL for CUDA tensors, gloo for CPU tensors. interleave:
    consecutive keys on one rank; see ContextShard. Heads are divided among the ranks as in tensor parallelism: a rank passes the queries of
    its own heads and receives the results of its own heads.

        context = ContextParallel(group, interleave=64)
        slots = context.shard.slots(positions, block_table, page_size)          # of new keys: -1 on other ranks
        step = context.plan(cache_seqlens, block_table, s_q, causal=True)       # once per step, for all layers
        out, lse = context.decode(q, k_cache, step)                             # every layer, on every rank

    A call gathers the queries of all heads (all-gather), attends with them to the rank's own keys, sends every rank the states of its heads
    (all-to-all), and merges the received states. With n = batch * s_q * h_q per rank and w ranks, a rank receives

        queries     (w - 1) * n * 1,152 bytes (e4m3: 576)
        states      (w - 1) * n * 1,040 bytes: out in 16 bits and lse

    There are two alternatives. Rescaling by the lse of all ranks with a reduce-scatter would receive (w - 1) * n * (1,024 + 4 w) bytes, in
    two dependent collectives. It would sum in 16 bits, in an order that the transport chooses. An all-gather of all states would receive
    (w - 1) * w * n * 1,028 bytes.

    Results are deterministic, whichever rank is ready first: states are merged in the order of ranks, in fp32. With batch_invariant=True
    the bits of a request do not depend on the other requests; they depend on the number of ranks and on interleave.

    Raises ValueError if torch.distributed is not initialised or this process is not in the group. Calls raise the errors of
    flash_mla_with_kvcache; a rank that raises leaves the other ranks waiting in a collective.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, interleave: int = 1) -> None:
        if not dist.is_available() or not dist.is_initialized():
            raise ValueError("torch.distributed is not initialised; supported: ContextParallel after init_process_group")
        rank = dist.get_rank(group)
        if rank < 0:
            raise ValueError("this process is not in the group; supported: a group of which it is a member")
        self.group = group
        self.shard = ContextShard(rank, dist.get_world_size(group), interleave)

    def __repr__(self) -> str:
        return f"ContextParallel(rank={self.shard.rank}, world={self.shard.world}, interleave={self.shard.interleave})"

    def plan(
        self,
        cache_seqlens: torch.Tensor,
        block_table: torch.Tensor,
        s_q: int = 1,
        causal: bool = False,
        *,
        cu_seqlens_q: torch.Tensor | None = None,
        total_q: int | None = None,
    ) -> ShardedRequests:
        """Return this rank's share of the requests of a step, without communication and without synchronisation.

        cache_seqlens: int32 [batch], keys per request on all ranks together, those of the new tokens included. block_table: int32 [batch,
        pages per request], the rank's own pages. s_q: query tokens per request. causal: as in flash_mla_with_kvcache, aligned bottom right.

        The newest keys lie on different ranks: the number of the rank's keys that a token attends to does not grow by one per token. The
        causal mask of a decode call cannot express that. Causal query tokens are therefore rows with lengths of their own, and the rank's
        keys are read s_q times.

        cu_seqlens_q, total_q: for requests with different numbers of query tokens, as in get_mla_metadata; s_q must then be 1. Every query
        token is a row, causal or not. Tokens of no request have no keys.
        """
        check_integer("s_q", s_q, 1, MAX_QUERY_TOKENS)
        check_flag("causal", causal)
        check_requests(cache_seqlens, block_table)
        if cu_seqlens_q is not None or total_q is not None:
            return self._plan_packed(cache_seqlens, block_table, causal, *_check_packed(cache_seqlens, s_q, cu_seqlens_q, total_q))
        if s_q == 1 or not causal:
            return ShardedRequests(block_table, self.shard.local_lengths(cache_seqlens), s_q, 1)
        unseen = torch.arange(s_q - 1, -1, -1, dtype=torch.int32, device=cache_seqlens.device)
        seen = self.shard.local_lengths(cache_seqlens.unsqueeze(1) - unseen)
        return ShardedRequests(block_table.repeat_interleave(s_q, dim=0), seen.flatten(), s_q, s_q)

    def _plan_packed(
        self, cache_seqlens: torch.Tensor, block_table: torch.Tensor, causal: bool, cu_seqlens_q: torch.Tensor, total_q: int
    ) -> ShardedRequests:
        """Return the rank's share of packed query tokens."""
        tokens = torch.arange(total_q, dtype=torch.int32, device=cache_seqlens.device)
        ends = cu_seqlens_q[1:]
        if not ends.shape[0]:
            return ShardedRequests(block_table.new_zeros(total_q, block_table.shape[1]), torch.zeros_like(tokens), 1, 1, packed=True)
        request = torch.searchsorted(ends, tokens, right=True).clamp(max=ends.shape[0] - 1)
        unseen = ends[request] - 1 - tokens
        keys = cache_seqlens[request] - (unseen if causal else 0)
        lengths = self.shard.local_lengths(keys.masked_fill(unseen < 0, 0))
        return ShardedRequests(block_table[request], lengths, 1, 1, packed=True)

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

        q: [batch, s_q, h_q, 576], this rank's heads; all ranks together have 1 to 128 heads. k_cache: the rank's own cache. q, k_cache and
        the options are as in flash_mla_with_kvcache, descale_q and descale_k equal on all ranks. requests: from plan().

        Returns out [batch, s_q, h_q, 512] and lse fp32 [batch, h_q, s_q] of this rank's heads over all keys. A token without keys on any
        rank has out 0 and lse empty_lse. A rank may have no keys of a request. With packed query tokens q is [total_q, h_q, 576], out
        [total_q, h_q, 512] and lse fp32 [total_q, h_q]; rows of tokens of no request are those of tokens without keys.
        """
        _check_class("requests", requests, ShardedRequests)
        if requests.packed:
            check_shape("q", spec_of("q", q), (requests.batch, "h_q", "d_qk"), " with these requests")
            q = q.unsqueeze(1)
        spec = spec_of("q", q)
        check_shape("q", spec, (requests.batch, requests.s_q, "h_q", "d_qk"), " with these requests")
        options = {"descale_q": descale_q, "descale_k": descale_k, "softmax_scale": softmax_scale, "batch_invariant": batch_invariant}
        planned = (requests.block_table, requests.cache_seqlens, D_V, requests.schedule)
        out, lse = self._attend(q, requests.rows_of_request, empty_lse, k_cache, planned, options)
        return (out.squeeze(1), lse.squeeze(2)) if requests.packed else (out, lse)

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
        kv_format: str | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Sparse decode over the keys of all ranks. Every rank of the group calls it, with equally many requests, tokens and heads.

        q: [batch, s_q, h_q, d_qk], this rank's heads. k_cache: the rank's own cache, of any format of sparse decode. selected: from
        shard.local_indices, with the same selection of keys on every rank. attn_sink: fp32 [h_q], this rank's heads; each sink is added
        once, not per rank. kv_format: as in flash_mla_with_kvcache. The other arguments and the results are as in decode.
        """
        _check_class("selected", selected, LocalIndices)
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
            "kv_format": kv_format,
        }
        out, lse = self._attend(q, 1, empty_lse, k_cache, (None, None, D_V, MlaSchedule()), options)
        if attn_sink is not None:
            rows = lse.transpose(1, 2)
            share = torch.sigmoid(rows - attn_sink).masked_fill(rows.isinf(), 0.0)  # out of an empty row is 0 with any sink
            out.mul_(share.unsqueeze(-1))
        return out, lse

    def indexer_topk(
        self, q: torch.Tensor, weights: torch.Tensor, index_cache: torch.Tensor, requests: ShardedRequests, topk: int
    ) -> torch.Tensor:
        """Choose keys by an indexer whose keys are distributed as those of attention. Every rank calls it with the same queries.

        q: float8_e4m3fn [batch, s_q, heads, 128], and weights: fp32 [batch * s_q, heads], of all heads, as in
        cute_mla.indexer.indexer_topk. index_cache: the rank's own, on the pages of requests.block_table. requests: from plan(), causal.

        Returns int32 [batch, s_q, topk], on every rank the same: positions in the request, ascending, then -1. They are those that
        indexer_topk chooses over all keys in one place. A rank computes the logits of its own keys, all at once, chooses among them, and
        receives (world - 1) * batch * s_q * topk * 8 bytes.
        """
        _check_class("requests", requests, ShardedRequests)
        if requests.s_q != requests.rows_of_request:
            raise ValueError(f"requests have {requests.s_q} query tokens that see the same keys; supported: those of plan(.., causal=True)")
        spec = spec_of("q", q)
        check_shape("q", spec, (requests.batch, requests.s_q, "heads", "columns"), " with these requests")
        operands = (q.flatten(0, 1).unsqueeze(1), weights, index_cache, requests.cache_seqlens, requests.block_table)
        values, local = own_topk(*operands, topk)
        positions = self.shard.positions(local)
        values, positions = (self._gather_ranks(part).transpose(0, 1).flatten(1) for part in (values, positions))
        return best_of(values, positions, topk).view(requests.batch, requests.s_q, topk)

    def join(self, rows: torch.Tensor) -> torch.Tensor:
        """Return rows of which each rank has some, bit for bit; every rank gets all of them.

        rows: contiguous, a multiple of 4 bytes a row, of any dtype; zero bytes in those of other ranks. It is overwritten. A rank receives
        each row twice, in a reduction of integers.
        """
        if self.shard.world > 1:
            dist.all_reduce(rows.view(torch.int32), group=self.group)
        return rows

    def _gather_ranks(self, own: torch.Tensor) -> torch.Tensor:
        """Gather a tensor of every rank: [world, ..]."""
        own = own.contiguous()
        if self.shard.world == 1:
            return own.unsqueeze(0)
        gathered = own.new_empty((self.shard.world, *own.shape))
        dist.all_gather_into_tensor(gathered.flatten(0, 1), own, group=self.group)
        return gathered

    def _attend(
        self,
        q: torch.Tensor,
        rows_of_request: int,
        empty_lse: float,
        k_cache: torch.Tensor,
        planned: tuple[Any, ...],
        options: dict[str, Any],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute out and lse of the rank's heads over all keys. planned, options: positional and keyword arguments of the decode call."""
        batch, s_q, own_heads, d_qk = q.shape
        rows, tokens, heads = batch * rows_of_request, s_q // rows_of_request, own_heads * self.shard.world
        queries = self._gather_heads(q).view(heads, rows, tokens, d_qk).permute(1, 2, 0, 3)
        states = q.new_empty((heads, rows, tokens, STATE_COLUMNS), dtype=torch.bfloat16 if q.element_size() == 1 else q.dtype)
        out, lse = _out_and_lse(states)
        flash_mla_with_kvcache(queries, k_cache, *planned, out=out.permute(1, 2, 0, 3), lse=lse.transpose(0, 1), **options)
        received = self._exchange_states(states).view(self.shard.world, own_heads, batch, s_q, STATE_COLUMNS)
        outs, lses = _out_and_lse(received)
        result = states.new_empty((batch, s_q, own_heads, D_V))
        result_lse = states.new_empty((batch, own_heads, s_q), dtype=torch.float32)
        states_of_ranks = outs.permute(0, 2, 3, 1, 4), lses.permute(0, 2, 3, 1)
        merge_states(*states_of_ranks, out=result, lse=result_lse.transpose(1, 2), empty_lse=empty_lse)
        return result, result_lse

    def _gather_heads(self, q: torch.Tensor) -> torch.Tensor:
        """Gather queries [heads of all ranks, batch, s_q, d_qk], contiguous.

        q is not copied if it is contiguous with heads first, the layout of a batched matmul over heads.
        """
        own = q.permute(2, 0, 1, 3).contiguous()
        if self.shard.world == 1:
            return own
        gathered = own.new_empty((self.shard.world * own.shape[0], *own.shape[1:]))
        dist.all_gather_into_tensor(gathered.view(torch.uint8), own.view(torch.uint8), group=self.group)
        return gathered

    def _exchange_states(self, states: torch.Tensor) -> torch.Tensor:
        """Exchange states of all heads over this rank's keys for states of its own heads over each rank's keys, in the order of ranks."""
        if self.shard.world == 1:
            return states
        received = torch.empty_like(states)
        dist.all_to_all_single(received.view(torch.uint8), states.view(torch.uint8), group=self.group)
        return received


def _check_packed(cache_seqlens: torch.Tensor, s_q: int, cu_seqlens_q: Any, total_q: Any) -> tuple[torch.Tensor, int]:
    """Return cu_seqlens_q and total_q. ValueError unless they are given both and fit the requests."""
    if cu_seqlens_q is None or total_q is None or s_q != 1:
        raise ValueError(
            f"cu_seqlens_q is {short_repr(cu_seqlens_q)}, total_q {short_repr(total_q)}, s_q {s_q}; supported: both with s_q 1, or neither"
        )
    check_counts(
        "cu_seqlens_q", spec_of("cu_seqlens_q", cu_seqlens_q), (cache_seqlens.shape[0] + 1,), cache_seqlens.device, "cache_seqlens"
    )
    return cu_seqlens_q, check_integer("total_q", total_q, 0, MAX_QUERY_TOKENS)


def _check_class(name: str, value: Any, expected: type) -> None:
    """Raise ValueError unless an argument is of the class that plan() or shard.local_indices() returns."""
    if not isinstance(value, expected):
        raise ValueError(f"{name} is {short_repr(value)}; supported: a {expected.__name__}")


def _out_and_lse(states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return views of out [.., 512] and lse fp32 [..] in states [.., STATE_COLUMNS]."""
    return states[..., :D_V], states.view(torch.float32)[..., _LSE_COLUMN]
