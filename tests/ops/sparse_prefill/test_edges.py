"""Edges of sparse prefill that no case of the suites draws, on the simulated device, and layouts on which no bit depends.

The API's refusals are tested without kernels in test_errors.py; its allocations in test_api.py.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import cute_mla
from cute_mla.spec.split_plan import TILE_KEYS
from cute_mla.testing.operations.sparse_prefill.case import SparsePrefillCase, make_sparse_prefill_tensors
from cute_mla.testing.runner import call
from tests.support.bench import Bench, expect, identical

KINDS = pytest.mark.parametrize(("dtype", "d_qk"), [("bf16", 576), ("bf16", 512)])

SMALL = SparsePrefillCase(s_q=4, h_q=5, s_kv=150, topk=130, sm_count=4)


@KINDS
def test_what_no_index_names_never_reaches_the_output(bench: Bench, dtype: str, d_qk: int) -> None:
    """NaN, infinities, and the largest values, whose products are infinite."""
    case = replace(SMALL, dtype=dtype, d_qk=d_qk, h_q=70, topk=70, indices="mixed")
    tensors = make_sparse_prefill_tensors(case)
    unnamed = tensors.kv[:, 0, 0].isnan()
    assert unnamed.sum() > 10
    other = replace(tensors, kv=tensors.kv.clone())
    fill = torch.tensor([math.inf, -math.inf, torch.finfo(tensors.kv.dtype).max, 0.0]).repeat(len(unnamed))
    other.kv[unnamed] = fill[: int(unnamed.sum()), None, None].to(other.kv)
    assert identical(bench.run(case, other), bench.run(case, tensors))


def test_nan_in_a_row_that_is_named_reaches_the_tokens_that_name_it(bench: Bench) -> None:
    case = replace(SMALL, topk=40)
    tensors = make_sparse_prefill_tensors(case)
    row = int(tensors.indices[1, 0, 7])
    tensors.kv[row, 0, 5] = math.nan
    out, _, _ = bench.run(case, tensors)
    naming = (tensors.indices[:, 0] == row).any(dim=-1)
    assert 0 < naming.sum() < len(naming)
    assert torch.equal(out.isnan().any(dim=2).any(dim=1), naming)


@pytest.mark.parametrize(("dtype", "d_qk", "h_q"), [("bf16", 576, 5), ("bf16", 512, 70)])
@pytest.mark.parametrize("counts", [(64, 100), pytest.param((1, 63, 65, 127, 128, 129, 200), marks=pytest.mark.slow)])
def test_lse_indexer_is_lse_of_a_call_that_ends_there(bench: Bench, dtype: str, d_qk: int, h_q: int, counts: tuple[int, ...]) -> None:
    """Bit for bit, for every kind of length; sinks do not count, and the other results are those of a call without it."""
    lengths = (200, 0, 130, 64, 65, -1)
    case = SparsePrefillCase(
        dtype, d_qk=d_qk, s_q=len(lengths), h_q=h_q, s_kv=150, topk=200, lengths=lengths, indices="mixed", sinks="drawn", values="rising",
        sm_count=2,
    )  # fmt: skip
    tensors = make_sparse_prefill_tensors(case)
    tensors.indices[2, :, 64:128] = -1  # a tile without keys, at the bound and behind it
    without = bench.run(case, tensors)
    assert tensors.topk_length is not None
    for count in counts:
        *others, lse_indexer = bench.run(replace(case, indexer_topk=count), tensors)
        assert identical(tuple(others), without), count
        ended = replace(tensors, topk_length=tensors.topk_length.clamp(max=count))
        assert identical((lse_indexer,), bench.run(case, ended)[2:]), count


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 3e38])
def test_a_row_behind_the_indexer_does_not_reach_its_lse(bench: Bench, value: float) -> None:
    """Not even in the same tile, and however much greater its score is."""
    case = replace(SMALL, s_q=2, topk=70, indexer_topk=40)
    tensors = make_sparse_prefill_tensors(case)
    tensors.indices[:] = torch.arange(70, dtype=torch.int32)
    tensors.kv.copy_(torch.randn(tensors.kv.shape, generator=torch.Generator().manual_seed(0)))
    expected = bench.run(case, tensors)[3]
    tensors.kv[40:70, 0, 5] = value
    out, _, _, lse_indexer = bench.run(case, tensors)
    assert identical((lse_indexer,), (expected,))
    assert value == 3e38 or not out.isfinite().all()


def test_what_a_neighbour_has_reaches_no_other_request(bench: Bench) -> None:
    """Indices are counted in the request's own rows; those before and behind belong to others."""
    case = SparsePrefillCase(batch=3, form="ragged", s_q=2, h_q=5, s_kv=100, topk=90, indices="mixed", sm_count=4)
    tensors = make_sparse_prefill_tensors(case)
    expected = bench.run(case, tensors)
    expect(case, tensors, expected)
    first, rows = case.row_ranges[2]
    other = replace(tensors, kv=tensors.kv.clone())
    other.kv[:first] = math.nan
    other.kv[first + rows :] = math.nan
    results = bench.run(case, other)
    assert identical(tuple(result[2] for result in results), tuple(result[2] for result in expected))
    assert results[0][0].isnan().any()


def instructions(bench: Bench, case: SparsePrefillCase, indices: Tensor) -> int:
    """Return warp instructions of a call with these indices, after its answer was found right."""
    tensors = replace(make_sparse_prefill_tensors(case), indices=indices)
    with cute_mla.simulate(bench.arch, case.sm_count) as device:
        results = call(case, tensors)
        executed = device.instructions
    expect(case, tensors, results)
    return executed


@pytest.mark.parametrize("h_q", [16, 128])
def test_tiles_without_valid_indices_are_skipped(bench: Bench, h_q: int) -> None:
    """In front, in the middle or behind: 7 of 8 tiles cost less than half of their instructions, for indices and handshakes."""
    case = SparsePrefillCase(s_q=2, h_q=h_q, s_kv=8 * TILE_KEYS, topk=8 * TILE_KEYS, sm_count=2)
    every = make_sparse_prefill_tensors(case).indices
    full = instructions(bench, case, every)
    alone = instructions(bench, case, every[..., :TILE_KEYS])
    for tile in (0, 4, 7):
        indices = torch.full_like(every, -1)
        indices[..., tile * TILE_KEYS : (tile + 1) * TILE_KEYS] = every[..., :TILE_KEYS]
        assert instructions(bench, case, indices) < alone + (full - alone) / 2, f"tile {tile}"


def test_tiles_of_invalid_indices_leave_the_bits_alone(bench: Bench) -> None:
    """Tiles without a valid index are skipped: wherever they stand, the remaining tiles form the same sequence."""
    case = SparsePrefillCase(s_q=3, h_q=20, s_kv=200, topk=3 * TILE_KEYS, sinks="drawn", values="rising", sm_count=2)
    tensors = make_sparse_prefill_tensors(case)
    expected = bench.run(case, tensors)
    tiles = [*tensors.indices.split(TILE_KEYS, dim=-1)]
    nothing = torch.full_like(tiles[0], -1)
    for spread in ([nothing, *tiles], [tiles[0], nothing, nothing, *tiles[1:], nothing], [*tiles[:2], nothing, tiles[2], nothing, nothing]):
        assert identical(bench.run(case, replace(tensors, indices=torch.cat(spread, dim=-1))), expected)


def test_bits_depend_on_neither_form_nor_layout(bench: Bench) -> None:
    """Requests of one length side by side, one behind the other, far apart or among other layers; results given or not."""
    case = SparsePrefillCase(batch=2, form="batched", s_q=3, h_q=10, s_kv=300, topk=200, indices="mixed", sm_count=4)
    tensors = make_sparse_prefill_tensors(case)
    expected = bench.run(case, tensors)
    offsets = torch.tensor([0, 300, 600], dtype=torch.int32)
    assert identical(bench.run(case, replace(tensors, kv=tensors.kv.flatten(0, 1), kv_offsets=offsets)), expected)
    for layout in ("layers", "far"):
        other = replace(case, kv_layout=layout, index_layout="odd", outputs="strided")  # type: ignore[arg-type]
        assert identical(bench.run(other), expected), layout
