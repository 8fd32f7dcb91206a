"""workspace_size and calls agree: a call takes a workspace of so many bytes, and refuses a smaller one."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import cute_mla
from cute_mla import indexer
from cute_mla.spec.arch import Arch
from tests.support.recording_device import RecordingDevice
from tests.support.zero_tensors import ints, zeros

Drawn = tuple[dict[str, Any], Callable[[torch.Tensor], Any]]  # arguments of workspace_size, and a call with a workspace


@pytest.fixture(params=[3, 132, 148])
def device(arch: Arch, request: pytest.FixtureRequest) -> Iterator[RecordingDevice]:
    with RecordingDevice(arch, sm_count=request.param).active() as device:
        yield device


def _decode(draw: random.Random, sparse: bool) -> Drawn:
    """Draw a decode call, with or without packed requests, batch_invariant and a second cache."""
    batch, s_q, h_kv = draw.choice((0, 1, 2, 7, 200)), draw.choice((0, 1, 2, 5, 70)), 1 if sparse else draw.choice((1, 1, 2))
    h_q = h_kv * draw.choice((1, 3, 16, 64))
    invariant, ragged = draw.random() < 0.5, draw.random() < 0.5
    pages, page_size, width = draw.choice((0, 1, 4)), draw.choice((64, 128)), draw.choice((0, 1, 40))
    d_qk = 576 if sparse else draw.choice((576, 320))
    size: dict[str, Any] = {"batch": batch, "s_q": s_q, "h_q": h_q, "h_kv": h_kv, "batch_invariant": invariant}
    tokens: tuple[int, ...] = (batch, s_q)
    arguments: dict[str, Any] = {}
    if ragged:
        size["s_q"] = max(s_q, 1)
        tokens = (draw.choice((0, 1, batch, batch * s_q)),)
        arguments = {"cu_seqlens_q": ints(batch + 1), "max_seqlen_q": size["s_q"]}
        size["total_q"] = tokens[0]
    topk, extra = draw.choice((0, 1, 64, 2048)), draw.choice((None, None, 0, 70))
    if sparse:
        arguments |= {"block_table": None, "cache_seqlens": None, "indices": ints(*tokens, topk)}
        if not ragged:
            arguments["topk_length"] = ints(batch)  # without it a call may need no workspace
        if extra is not None:
            second = ints(*tokens, extra)
            arguments |= {"extra_k_cache": zeros(pages, page_size, 1, d_qk), "extra_indices_in_kvcache": second}
        if invariant or draw.random() < 0.5:
            size["topk"] = topk + (extra or 0)
    else:
        arguments |= {"block_table": ints(batch, width), "cache_seqlens": ints(batch)}
        size["head_dim_v"] = 256 if d_qk == 320 else 512
        if invariant:
            size["max_cache_seqlen"] = width * page_size
    q, k_cache = zeros(*tokens, h_q, d_qk), zeros(pages, page_size, h_kv, d_qk)

    def call(workspace: torch.Tensor) -> Any:
        schedule, _ = cute_mla.get_mla_metadata()
        more = {**arguments, "head_dim_v": size.get("head_dim_v", 512), "batch_invariant": invariant, "workspace": workspace}
        return cute_mla.flash_mla_with_kvcache(q, k_cache, tile_scheduler_metadata=schedule, **more)

    return size, call


def _backward(draw: random.Random) -> Drawn:
    """Draw a backward pass."""
    batch, total_q, total_k = draw.choice((0, 1, 3)), draw.choice((0, 1, 5, 130)), draw.choice((0, 3, 70))
    h_kv, d_qk = draw.choice((1, 2)), draw.choice((128, 192, 256))
    h_q, d_v = h_kv * draw.choice((1, 3)), 256 if d_qk == 256 else 128
    q = zeros(total_q, h_q, d_qk)
    rows, keys = zeros(total_q, h_q, d_v), (zeros(total_k, h_kv, d_qk), zeros(total_k, h_kv, d_v))
    lengths = (ints(batch + 1),) * 2
    size: dict[str, Any] = {"batch": batch, "s_q": total_q, "h_q": h_q, "h_kv": h_kv, "total_q": total_q}

    def call(workspace: torch.Tensor) -> Any:
        lse = torch.zeros(total_q, h_q)
        return cute_mla.flash_attn_varlen_backward(rows, q, *keys, rows, lse, *lengths, total_q, total_k, workspace=workspace)

    return size, call


def _topk(draw: random.Random, paged: bool) -> Drawn:
    """Draw a choice of keys."""
    batch, tokens = draw.choice((0, 1, 3)) if paged else 1, draw.choice((0, 1, 2, 9))
    heads, topk, pages = draw.choice((1, 64)), draw.choice((0, 1, 64, 5000)), draw.choice((0, 1, 40))
    keys = pages * 64
    size: dict[str, Any] = {"batch": batch, "s_q": tokens, "h_q": heads, "topk": topk, "max_cache_seqlen": keys}
    q, weights = zeros(batch, tokens, heads, 128, dtype=torch.float8_e4m3fn), torch.zeros(batch * tokens, heads)

    def call(workspace: torch.Tensor) -> Any:
        if not paged:
            row = (zeros(keys, 128, dtype=torch.float8_e4m3fn), torch.zeros(keys))
            ends = ints(tokens)
            return indexer.indexer_topk_prefill(q[0], row, weights, ends, ends, topk, workspace=workspace)
        cache, table = torch.zeros(2, 64, 1, 132, dtype=torch.uint8), ints(batch, pages)
        return indexer.indexer_topk(q, weights, cache, ints(batch), table, topk, workspace=workspace)

    return size, call


OPS: dict[str, Callable[[random.Random], Drawn]] = {
    "dense_decode": lambda draw: _decode(draw, False),
    "sparse_decode": lambda draw: _decode(draw, True),
    "dense_prefill_backward": _backward,
    "indexer_topk": lambda draw: _topk(draw, draw.random() < 0.5),
}


@pytest.mark.in_turn
@pytest.mark.parametrize("op", OPS)
def test_a_call_needs_as_many_bytes_as_workspace_size_says(device: RecordingDevice, op: str) -> None:
    draw = random.Random(0)
    for _ in range(100):
        size, call = OPS[op](draw)
        nbytes = cute_mla.workspace_size(op, **size, device="cpu")
        call(torch.empty(nbytes, dtype=torch.uint8))
        if nbytes:
            with pytest.raises(ValueError, match=f"workspace has {nbytes - 1} bytes; supported: at least {nbytes}, "):
                call(torch.empty(nbytes - 1, dtype=torch.uint8))
