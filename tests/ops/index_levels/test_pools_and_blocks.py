"""Indexers in two steps: pooled keys written in pieces, pools expanded to tokens, blocks of keys and the keys of these."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import cute_mla
from cute_mla import reference
from cute_mla.cache import dequantise_cache, quantise_cache
from cute_mla.indexer import (
    expand_pools,
    fp8_paged_mqa_logits,
    indexer_topk,
    pages_of_blocks,
    select_blocks,
    slots_of_positions,
    write_pooled_index_keys,
)
from cute_mla.layer.index_keys import gather_index_rows
from cute_mla.spec.arch import Arch

POOL, PAGE = 16, 16
TABLE = torch.tensor([[3, 1], [4, 0]], dtype=torch.int32)
LENGTHS = (200, 37)


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


STATES = [drawn(length, 256, seed=length) for length in LENGTHS]
BIAS = drawn(POOL, 128)


def pooled_cache(ends: Sequence[Sequence[int]], ring: int = POOL, tail_rows: Tensor | None = None, hadamard: bool = False) -> Tensor:
    """Write the pooled keys of both requests in steps that end there, and return the cache; NaN where nothing was written."""
    cache, tail = torch.full((5, PAGE, 1, 132), 0xFF, dtype=torch.uint8), torch.full((3, ring, 256), torch.nan)
    before = [0, 0]
    for after in ends:
        parts = [states[first:end] for states, first, end in zip(STATES, before, after, strict=True)]
        counts = torch.tensor([0, *(len(part) for part in parts)], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        k, gate = torch.cat(parts).split(128, dim=1)
        context = torch.tensor(before, dtype=torch.int32)
        write_pooled_index_keys(k, gate, BIAS, cache, TABLE, tail, counts, context, tail_rows=tail_rows, hadamard=hadamard)
        before = list(after)
    return cache


def slots_of_pools(request: int) -> Tensor:
    pool = torch.arange(LENGTHS[request] // POOL)
    return TABLE[request][pool // PAGE].long() * PAGE + pool % PAGE


def test_pooled_keys() -> None:
    """Against softmax and sum in fp64, within the rounding of e4m3; nothing else is written."""
    cache = pooled_cache([LENGTHS])
    for request, states in enumerate(STATES):
        k, gate = states[: len(states) // POOL * POOL].double().unflatten(0, (-1, POOL)).split(128, dim=2)
        expected = ((gate + BIAS.double()).softmax(dim=1) * k).sum(dim=1)
        found = gather_index_rows(cache, slots_of_pools(request))
        values = found.values.double() * found.scales.double().unsqueeze(1)
        assert ((values - expected).abs() <= expected.abs() / 16 + found.scales.double().unsqueeze(1) / 512).all()
    written = torch.cat([slots_of_pools(0), slots_of_pools(1)])
    kept = gather_index_rows(cache, torch.tensor([slot for slot in range(5 * PAGE) if slot not in written.tolist()]))
    assert (kept.values.view(torch.uint8) == 0xFF).all()


@pytest.mark.parametrize(
    ("ends", "ring"),
    [
        ([(100, 0), (100, 5), (101, 31), (116, 32), (117, 37), (200, 37)], POOL),
        ([(15, 16), (16, 17), (20, 18), (49, 33), (200, 37)], 19),
        ([*((step, min(step, 37)) for step in range(1, 201))], POOL),
    ],
)
def test_pieces_give_the_same_bytes(ends: list[tuple[int, int]], ring: int) -> None:
    whole = pooled_cache([LENGTHS], hadamard=ring == 19)
    assert torch.equal(pooled_cache(ends, ring, torch.tensor([2, 0]), hadamard=ring == 19), whole)


def test_drafts_that_are_taken_back() -> None:
    """Five drafts behind 31 tokens, of which none stays: ring is 16 - 1 + 5 tokens. A smaller one would lose the first of the pool."""
    cache, tail = torch.zeros(5, PAGE, 1, 132, dtype=torch.uint8), torch.full((1, 20, 256), torch.nan)

    def step(states: Tensor, context: int) -> None:
        k, gate = states.split(128, dim=1)
        bounds = torch.tensor([0, len(states)], dtype=torch.int32)
        write_pooled_index_keys(k, gate, BIAS, cache, TABLE[:1], tail, bounds, torch.tensor([context], dtype=torch.int32))

    step(STATES[0][:31], 0)
    step(drawn(5, 256, seed=9), 31)
    step(STATES[0][31:48], 31)
    whole = gather_index_rows(pooled_cache([LENGTHS]), slots_of_pools(0)[:3])
    assert torch.equal(gather_index_rows(cache, slots_of_pools(0)[:3]).values.view(torch.uint8), whole.values.view(torch.uint8))


def test_pools_become_tokens() -> None:
    pools = torch.tensor([[0, 2, -1], [0, 1, 3], [-1, -1, -1], [-1, -1, -1]], dtype=torch.int32)
    positions, counts = expand_pools(pools, torch.tensor([14, 16, 3, 0], dtype=torch.int32), 4)
    assert positions.tolist() == [
        [0, 1, 2, 3, 8, 9, 10, 11, 12, 13, *[-1] * 5],
        [0, 1, 2, 3, 4, 5, 6, 7, 12, 13, 14, 15, *[-1] * 3],
        [0, 1, 2, *[-1] * 12],
        [-1] * 15,
    ]
    assert counts.tolist() == [10, 12, 3, 0]
    nothing, few = expand_pools(pools[:, :0], torch.tensor([14, 16, 3, 0], dtype=torch.int32), 4)
    assert (nothing[0].tolist(), few.tolist()) == ([12, 13, -1], [2, 0, 3, 0])
    slots = slots_of_positions(positions[:2, :12], torch.tensor([[5, 1], [2, 0]], dtype=torch.int32), 8)
    assert slots[0].tolist() == [40, 41, 42, 43, 8, 9, 10, 11, 12, 13, -1, -1]
    assert slots[1].tolist() == [16, 17, 18, 19, 20, 21, 22, 23, 4, 5, 6, 7]


def test_all_of_it_by_the_kernels(arch: Arch) -> None:
    """Two tokens of a request choose pools and attend to their tokens and the tail, over keys of 528 bytes, as in torch."""
    cache, tokens = pooled_cache([LENGTHS]), 2
    q8, weights = drawn(2, tokens, 8, 128).to(torch.float8_e4m3fn), drawn(4, 8)
    keys = quantise_cache(drawn(4, 64, 1, 512), "nope_528")
    table = torch.tensor([[2, 0, 3, 1], [1, 3, 0, 2]], dtype=torch.int32)
    queries = drawn(2, tokens, 16, 512).bfloat16()
    seen = torch.tensor([[199, 200], [36, 37]], dtype=torch.int32)
    with cute_mla.simulate(arch, 2) as device:
        pools = indexer_topk(q8, weights, cache, seen // POOL, TABLE, 3)
        positions, counts = expand_pools(pools, seen.flatten(), POOL)
        indices = slots_of_positions(positions, table, 64).unflatten(0, (2, tokens))
        metadata = cute_mla.get_mla_metadata()
        out, _ = cute_mla.flash_mla_with_kvcache(
            queries, keys, None, None, 512, *metadata, is_fp8_kvcache=True, indices=indices, kv_format="nope_528"
        )
    assert device.findings == []
    wanted_pools = reference.indexer_topk(q8, weights, cache, seen // POOL, TABLE, 3)
    assert torch.equal(pools, wanted_pools)
    assert counts.tolist() == [3 * POOL + 199 % 16, 3 * POOL + 200 % 16, 36, 37]
    rows = reference.IndexedCache(dequantise_cache(keys, "nope_528").flatten(0, 2), indices, None)
    wanted, _ = reference.sparse_decode(queries, [rows], 512**-0.5)
    assert (out.double() - wanted.double()).abs().max() <= 0.015 * wanted.abs().max()


@pytest.mark.parametrize("block", [16, 32])
def test_keys_within_blocks(block: int, arch: Arch) -> None:
    """Choose by indexer_topk over the pages of blocks the keys with the greatest logits of all keys in these blocks."""
    cache, q8, weights = index_cache(), drawn(2, 2, 8, 128, seed=3).to(torch.float8_e4m3fn), drawn(4, 8, seed=4)
    later, table = (
        drawn(2, 2, 8, 128, seed=5).to(torch.float8_e4m3fn),
        torch.tensor([[7, 2, 5, 0, 3, 1], [4, 6, 1, 8, 2, 5]], dtype=torch.int32),
    )
    seen = torch.tensor([[89, 90], [0, 17]], dtype=torch.int32)
    with cute_mla.simulate(arch, 2) as device:
        logits = fp8_paged_mqa_logits(q8, cache, weights, seen, table, None, 96)
        blocks = select_blocks(logits, seen.flatten(), 3, block)
        pages, keys = pages_of_blocks(blocks, seen.flatten(), block, table, PAGE)
        chosen = indexer_topk(later.flatten(0, 1).unsqueeze(1), weights, cache, keys, pages, 9, slots=True)
    assert device.findings == []
    own = reference.fp8_paged_mqa_logits(later, cache, weights, seen, table, 96)
    for token, length in enumerate(seen.flatten().tolist()):
        greatest = [float(logits[token, first : min(first + block, length)].max()) for first in range(0, length, block)]
        order = sorted(range(len(greatest)), key=lambda each: (each != len(greatest) - 1, -greatest[each], each))[:3]
        assert [each for each in blocks[token].tolist() if each >= 0] == sorted(order)
        inside = torch.tensor([key // block in order and key < length for key in range(96)])
        best = reference.topk_indices(own[token : token + 1].masked_fill(~inside, -torch.inf), torch.tensor([96]), 9)[0]
        best = best[inside[best.long()]]
        slots = table[token // 2][(best // PAGE).long()] * PAGE + best % PAGE
        assert chosen[token][chosen[token] >= 0].tolist() == slots.tolist()


def index_cache() -> Tensor:
    """Return an index cache of nine pages with random keys."""
    cache = torch.zeros(9, PAGE, 1, 132, dtype=torch.uint8)
    values, scales = cache.flatten(1).split([PAGE * 128, PAGE * 4], dim=1)
    values.view(torch.float8_e4m3fn)[:] = drawn(9, PAGE * 128, seed=2).to(torch.float8_e4m3fn)
    scales.view(torch.float32)[:] = 1.0
    return cache


def test_pages_and_lengths_out_of_range() -> None:
    """Negative pages and those behind a table are no slots, and a length is at least 0."""
    positions, table = torch.tensor([[0, 7, 8, 300, -1]], dtype=torch.int32), torch.tensor([[-1, 2]], dtype=torch.int32)
    assert slots_of_positions(positions, table, 8).tolist() == [[-1, -1, 16, -1, -1]]
    assert slots_of_positions(positions, table[:, :0], 8).tolist() == [[-1] * 5]
    found, counts = expand_pools(torch.full((1, 1), -1, dtype=torch.int32), torch.tensor([-3], dtype=torch.int32), 2)
    assert (found.tolist(), counts.tolist()) == ([[-1] * 3], [0])
    pages, _ = pages_of_blocks(torch.tensor([[0, 1]], dtype=torch.int32), torch.tensor([5], dtype=torch.int32), 16, table[:, :0], 8)
    assert pages.tolist() == [[-1] * 4]


@pytest.mark.parametrize("length", [5, 50])
def test_logits_that_are_no_numbers(length: int, arch: Arch) -> None:
    """NaN hides no other key of its block, and a length beyond the logits is that of all keys, the last block among them."""
    logits = torch.tensor([[2.0, 1.0, torch.nan, 5.0, -torch.inf]])
    with cute_mla.simulate(arch, 1):
        assert select_blocks(logits, torch.tensor([length], dtype=torch.int32), 2, 2).tolist() == [[1, 2]]


def test_shapes_that_do_not_match() -> None:
    ints = torch.zeros(4, 4, dtype=torch.int32)
    given: dict[str, Any] = {
        "k": torch.zeros(3, 128),
        "gate": torch.zeros(3, 128),
        "bias": BIAS,
        "index_cache": torch.zeros(5, PAGE, 1, 132, dtype=torch.uint8),
        "block_table": TABLE[:1],
        "tail": torch.zeros(1, 16, 256),
        "cu_seqlens": torch.tensor([0, 3], dtype=torch.int32),
        "context_lens": ints[0, :1],
    }
    for changes, message in (
        ({"gate": torch.zeros(3, 64)}, r"gate has shape \[3, 64\]; supported: \[3, 128\]"),
        ({"tail": torch.zeros(1, 15, 256)}, "tail has 15 tokens a row; supported: pools of 16 tokens, and so many or more"),
        ({"tail": torch.zeros(0, 16, 256)}, "tail has 0 rows, and tail_rows is None; supported: a row for each of 1 requests"),
        ({"tail_rows": torch.tensor([0, 1])}, r"tail_rows has shape \[2\]; supported: \[1\]"),
        ({"index_cache": torch.zeros(5, PAGE, 1, 132)}, "index_cache has dtype torch.float32; supported: torch.uint8"),
        ({"index_cache": torch.zeros(5, PAGE, 1, 264, dtype=torch.uint8)[..., :132]}, "supported: contiguous pages"),
        ({"context_lens": ints[0, :2]}, r"cu_seqlens has shape \[2\]; supported: \[3\]"),
        ({"block_table": TABLE}, r"block_table has shape \[2, 2\]; supported: \[1, pages per request\]"),
        ({"bias": BIAS[:0]}, r"bias.shape\[0\] is 0; supported: an integer, 1 or more"),
    ):
        with pytest.raises(ValueError, match=message):
            write_pooled_index_keys(**{**given, **changes})
    for call, message in (
        (
            lambda: pages_of_blocks(ints[:1, :1], ints[0, :1], 24, TABLE[:1], 16),
            "blocks have 24 keys and pages 16; supported: blocks of whole",
        ),
        (
            lambda: pages_of_blocks(ints[:3], ints[0, :3], 16, TABLE, 16),
            "there are 3 tokens and 2 requests; supported: as many tokens of each",
        ),
        (lambda: pages_of_blocks(ints, ints[0, :1], 16, TABLE, 16), r"lengths has shape \[1\]; supported: \[4\]"),
        (lambda: slots_of_positions(ints, TABLE[:0], 16), "there are 4 tokens and 0 requests"),
        (lambda: slots_of_positions(ints, TABLE, 0), "page_size is 0; supported: an integer, 1 or more"),
        (lambda: expand_pools(ints, ints[0, :1], 2), r"lengths has shape \[1\]; supported: \[4\]"),
        (lambda: expand_pools(ints, ints[0], 0), "pool is 0; supported: an integer, 1 or more"),
        (lambda: select_blocks(torch.zeros(4, 4), ints[0], 1, 0), "block is 0; supported: an integer, 1 or more"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
