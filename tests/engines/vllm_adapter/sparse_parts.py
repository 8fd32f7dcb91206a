"""Layers of CUTE_MLA_SPARSE, their caches and what an indexer chooses, and attention to it in fp32."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from vllm.v1.attention.backend import CommonAttentionMetadata

from cute_mla.cache import dequantise_cache, quantise_cache
from cute_mla.reference import attention
from tests.engines.vllm_adapter.vllm_parts import (
    DEEPSEEK_V3,
    LATENT,
    ROPE,
    SCALE,
    Columns,
    Served,
    Setting,
    empty_cache,
    query_rows,
    rows_of,
    serve,
)

TOPK = 128


def served_by(heads: int, cache: str, folder: Path, columns: Columns = DEEPSEEK_V3, **options: Any) -> Served:
    return serve(Setting(heads, cache=cache, topk=TOPK, columns=columns), folder, "CUTE_MLA_SPARSE", **options)


def filled_cache(batch: CommonAttentionMetadata, setting: Setting) -> tuple[Tensor, list[Tensor]]:
    """Return (the cache, NaN where there are no keys, what each request's keys are worth)."""
    generator = torch.Generator().manual_seed(3)
    cache, worth = empty_cache(batch, setting), []
    for request in range(batch.num_reqs):
        blocks, rows = rows_of(batch, request, setting.block_size)
        keys = torch.randn(len(rows), setting.columns.latent + setting.columns.rope, generator=generator).bfloat16()
        if setting.cache == "fp8_ds_mla":
            padded = torch.nn.functional.pad(keys, (0, LATENT + ROPE - keys.shape[1]))  # vLLM has zeros for rotary columns
            packed = quantise_cache(padded[None, :, None], "fp8_656")
            cache[blocks, rows] = packed[0, :, 0].view(torch.uint8)
            keys = dequantise_cache(packed, "fp8_656")[0, :, 0, : keys.shape[1]]
        else:
            cache[blocks, rows] = keys
        worth.append(keys.float())
    return cache, worth


def choose(served: Served, batch: CommonAttentionMetadata) -> Tensor:
    """Fill the layer's buffer as an indexer does: some visible keys for each token, with -1 between and after them."""
    generator = torch.Generator().manual_seed(8)
    buffer = served.layer.impl.topk_indices_buffer
    buffer.fill_(-1)
    for request in range(batch.num_reqs):
        own, keys = query_rows(batch, request), int(batch.seq_lens[request])
        for token in range(own.start, own.stop):
            seen = keys - (own.stop - 1 - token)
            chosen = torch.randperm(seen, generator=generator)[: min(seen, TOPK - 9)]
            buffer[token, 3 : 3 + len(chosen)] = chosen.to(torch.int32)
    return buffer


def expected(
    batch: CommonAttentionMetadata, q: Tensor, worth: Sequence[Tensor], chosen: Tensor, shard: tuple[int, int], scale: float = SCALE
) -> tuple[Tensor, Tensor]:
    """Out [tokens, heads, 512] and lse [tokens, heads] over the chosen keys of a rank; shard: how many ranks there are, and which it is."""
    ranks, rank = shard
    out, lse = torch.zeros(*q.shape[:2], LATENT), torch.full(q.shape[:2], -math.inf)
    for request in range(batch.num_reqs):
        own = query_rows(batch, request)
        for token in range(own.start, own.stop):
            ids = chosen[token][chosen[token] >= 0]
            keys = worth[request][(ids[ids % ranks == rank] // ranks).long()][None]
            visible = torch.ones(1, keys.shape[1], dtype=torch.bool)
            found, norm = attention(q[token, :, None].float(), keys, keys[..., :LATENT], scale, visible, -math.inf)
            out[token], lse[token] = found[:, 0], norm[:, 0]
    return out, lse


def queries(tokens: int, heads: int) -> tuple[Tensor, Tensor]:
    q = torch.randn(tokens, heads, LATENT + ROPE, generator=torch.Generator().manual_seed(4)).bfloat16()
    return q[..., :LATENT], q[..., LATENT:]
