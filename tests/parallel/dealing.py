"""Calls over keys that are dealt to ranks: what a rank makes of one, and what comes out where nothing is dealt."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from datetime import timedelta
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import cute_mla
from cute_mla import reference
from cute_mla.cache import dequantise_cache, quantise_cache
from cute_mla.parallel import ContextParallel, ContextShard
from cute_mla.reference import IndexedCache
from cute_mla.spec.cache_format import FORMATS
from cute_mla.spec.mla import ceil_div

PAGE_SIZE = 64
UNUSED = 2_147_480_000
SPARE_PAGES = 2
SPARE_TOKENS = 2  # of no request, behind packed query tokens
DESCALE_Q, DESCALE_K = 0.0171, 0.0137
Result = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class DealtCall:
    """One call on `heads` query heads of every rank.

    lengths: keys of each request, on all ranks together. topk: of sparse decode; 0: dense. fp8: e4m3 queries and cache, or with topk a
    cache of the format kv_format. sinks: with attn_sink, one of them +inf and one -inf. tokens: of a dense causal call, the query tokens
    of each request, packed: the last ones of its s_q.
    """

    lengths: tuple[int, ...]
    s_q: int = 1
    heads: int = 2
    interleave: int = 1
    causal: bool = False
    fp8: bool = False
    topk: int = 0
    kv_format: str = "fp8_656"
    sinks: bool = False
    tokens: tuple[int, ...] = ()
    batch_invariant: bool = False
    empty_lse: float = math.inf

    @property
    def packed(self) -> Tensor:
        """Return bool [batch, s_q]: the query tokens that a call with packed ones has."""
        return torch.arange(self.s_q) >= self.s_q - torch.tensor(self.tokens)[:, None]

    @property
    def d_qk(self) -> int:
        """Columns of a key."""
        return FORMATS[self.kv_format].d_qk

    def q(self, world: int) -> Tensor:
        """bf16 or e4m3 [batch, s_q, all heads, columns of a key], drawn head by head."""
        drawn = normal(1, world * self.heads, len(self.lengths), self.s_q, self.d_qk).permute(1, 2, 0, 3)
        return (drawn / DESCALE_Q).to(torch.float8_e4m3fn) if self.fp8 and not self.topk else drawn.bfloat16()

    def keys(self) -> Tensor:
        """Return the keys of all requests one behind the other, as a cache holds them: [keys, columns or bytes]."""
        drawn = normal(2, sum(self.lengths), self.d_qk)
        if self.fp8 and self.topk:
            return quantise_cache(drawn[:, None, None], self.kv_format, power_of_two=True).flatten(0, 2)
        return (drawn / DESCALE_K).to(torch.float8_e4m3fn) if self.fp8 else drawn.bfloat16()

    def positions(self) -> Tensor:
        """int32 [batch, s_q, topk]: what tokens choose, each differently, with gaps; nothing of a request without keys."""
        chosen = torch.full((len(self.lengths), self.s_q, self.topk), -1, dtype=torch.int32)
        draw = torch.Generator().manual_seed(3)
        for request, length in enumerate(self.lengths):
            for token in range(self.s_q):
                some = torch.randperm(length, generator=draw)[: self.topk - 5].int()
                places = torch.randperm(self.topk, generator=draw)[: len(some)]
                chosen[request, token, places] = some
        return chosen

    def attn_sink(self, world: int) -> Tensor | None:
        """fp32 [all heads]."""
        if not self.sinks:
            return None
        sinks = 2 * normal(4, world * self.heads) * 10
        sinks[0], sinks[-1] = math.inf, -math.inf
        return sinks

    def descales(self) -> dict[str, Tensor]:
        """Return the descales of e4m3 operands of dense decode."""
        return {"descale_q": torch.tensor([DESCALE_Q]), "descale_k": torch.tensor([DESCALE_K])} if self.fp8 and not self.topk else {}

    def cache(self, shard: ContextShard) -> tuple[Tensor, Tensor]:
        """Return a rank's cache, all NaN but for its own keys, on pages in random order; and its block table."""
        local = shard.local_lengths(torch.tensor(self.lengths, dtype=torch.int32)).tolist()
        pages = [ceil_div(length, PAGE_SIZE) for length in local]
        keys = self.keys()
        order = torch.randperm(sum(pages) + SPARE_PAGES, generator=torch.Generator().manual_seed(shard.rank)).int()
        table = torch.full((len(pages), max(pages) + 1), UNUSED, dtype=torch.int32)
        cache = torch.full((len(order) * PAGE_SIZE, keys.shape[1] * keys.element_size()), 0xFF, dtype=torch.uint8).view(keys.dtype)
        used = first = 0
        for request, (count, length) in enumerate(zip(pages, self.lengths, strict=True)):
            table[request, :count] = order[used : used + count]
            slots = shard.slots(torch.arange(length)[None], table[request : request + 1], PAGE_SIZE)[0]
            cache.view(torch.uint8)[slots[slots >= 0]] = keys[first : first + length].view(torch.uint8)[slots >= 0]
            used, first = used + count, first + length
        return cache.view(len(order), PAGE_SIZE, 1, -1), table


def normal(seed: int, *shape: int) -> Tensor:
    """fp32: N(0, 1)/10 clamped to +-1, as the cases of ops."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).div_(10).clamp_(-1, 1)


def expected(call: DealtCall, world: int) -> Result:
    """Return the reference over all keys, of all heads."""
    whole = ContextShard(0, 1)
    cache, table = call.cache(whole)
    lengths = torch.tensor(call.lengths, dtype=torch.int32)
    if not call.topk:
        scales = call.descales()
        scales_of = (scales.get("descale_q"), scales.get("descale_k"))
        out, lse = reference.dense_decode(call.q(world), cache, table, lengths, 576**-0.5, call.causal, call.empty_lse, scales_of)
        if call.tokens:
            out[~call.packed] = lse.transpose(1, 2)[~call.packed] = math.nan
        return out, lse
    indices, topk_length = whole.local_indices(call.positions(), table, PAGE_SIZE)
    slots = dequantise_cache(cache, call.kv_format if call.fp8 else "latent").flatten(0, 2)
    return reference.sparse_decode(call.q(world), [IndexedCache(slots, indices, topk_length)], None, call.attn_sink(world), call.empty_lse)


def undealt(call: DealtCall, world: int, arch: str) -> Result:
    """Return a dense call over all keys in one cache, of all heads."""
    cache, table = call.cache(ContextShard(0, 1))
    lengths = torch.tensor(call.lengths, dtype=torch.int32)
    with cute_mla.simulate(arch, 4):
        return cute_mla.flash_mla_with_kvcache(
            call.q(world), cache, table, lengths, 512, *cute_mla.get_mla_metadata(), causal=call.causal, empty_lse=call.empty_lse
        )


def run(call: DealtCall, context: ContextParallel) -> Result:
    """Return the results of this rank's heads."""
    shard = context.shard
    cache, table = call.cache(shard)
    own = slice(shard.rank * call.heads, (shard.rank + 1) * call.heads)
    q = call.q(shard.world)[:, :, own]
    options = {"batch_invariant": call.batch_invariant, "empty_lse": call.empty_lse}
    if call.tokens:
        return _run_packed(call, context, q, (cache, table), options)
    if not call.topk:
        lengths = torch.tensor(call.lengths, dtype=torch.int32)
        requests = context.plan(lengths, table, call.s_q, call.causal)
        return context.decode(q, cache, requests, **call.descales(), **options)  # type: ignore[arg-type]
    sinks = call.attn_sink(shard.world)
    selected = shard.local_indices(call.positions(), table, PAGE_SIZE)
    own_sinks, kv_format = None if sinks is None else sinks[own].contiguous(), call.kv_format if call.fp8 else None
    return context.sparse_decode(q, cache, selected, attn_sink=own_sinks, kv_format=kv_format, **options)  # type: ignore[arg-type]


def _run_packed(call: DealtCall, context: ContextParallel, q: Tensor, keys: tuple[Tensor, Tensor], options: dict[str, Any]) -> Result:
    """Return the results of packed query tokens where they are in a call of s_q tokens; NaN for others. Behind them are tokens of none."""
    cache, table = keys
    offsets = torch.tensor([0, *accumulate(call.tokens)], dtype=torch.int32)
    lengths, used = torch.tensor(call.lengths, dtype=torch.int32), sum(call.tokens)
    requests = context.plan(lengths, table, causal=True, cu_seqlens_q=offsets, total_q=used + SPARE_TOKENS)
    tokens = torch.cat([q[call.packed], q.new_zeros(SPARE_TOKENS, *q.shape[2:])])
    packed_out, packed_lse = context.decode(tokens, cache, requests, **options)  # type: ignore[arg-type]
    out = packed_out.new_full((*q.shape[:3], 512), math.nan)
    lse = packed_lse.new_full(q.shape[:3], math.nan)
    out[call.packed], lse[call.packed] = packed_out[:used], packed_lse[:used]
    return out, lse.transpose(1, 2)


class Wire:
    """Counts the bytes that a process receives from others in collectives."""

    def __init__(self, monkeypatched: object, world: int) -> None:
        self.received: list[int] = []
        for name in ("all_gather_into_tensor", "all_to_all_single"):
            setattr(monkeypatched, name, self._counting(getattr(monkeypatched, name), world))

    def _counting(self, collective: object, world: int) -> object:
        def counted(output: Tensor, given: Tensor, **options: object) -> object:
            self.received.append(output.nbytes * (world - 1) // world)
            return collective(output, given, **options)  # type: ignore[operator]

        return counted


def rank_main(rank: int, world: int, arch: str, calls: list[DealtCall], folder: Path) -> None:
    """One process: all calls, and the first of them again with the ranks ready in another order. Leaves results and bytes in a file."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/store", timedelta(seconds=300), world, rank)
    wire = Wire(dist, world)
    found = []
    with cute_mla.simulate(arch, 4):
        for call, delay in ((calls[0], rank), (calls[0], world - rank), *((call, 0) for call in calls[1:])):
            first = len(wire.received)
            time.sleep(0.2 * delay)
            found.append((run(call, ContextParallel(interleave=call.interleave)), wire.received[first:]))
    torch.save(found, folder / f"rank{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()
