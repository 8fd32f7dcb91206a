"""Bits of sparse prefill: equal under every schedule, and wherever a token's rows lie.

Their independence of other tokens is tested in tests/ops/batch_invariance/test_batch_invariance.py.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from cute_mla.spec.split_plan import TILE_KEYS
from cute_mla.testing.cases.sparse_prefill import SparsePrefillCase, make_sparse_prefill_tensors
from cute_mla.testing.runner import schedules
from tests.support.bench import Bench, identical

MIXED = SparsePrefillCase(
    batch=2, form="batched", s_q=5, h_q=10, s_kv=300, topk=200, lengths=(200, 0, 65, 1, 130, 200, 200, 64, 0, 200), indices="mixed",
    sinks="drawn", sm_count=4,
)  # fmt: skip
WIDE = replace(MIXED, dtype="fp16", d_qk=512, h_q=128)
CASES = pytest.mark.parametrize("case", [MIXED, WIDE], ids=["few heads", "all heads"])


@CASES
def test_every_schedule_gives_the_same_bits(bench: Bench, case: SparsePrefillCase) -> None:
    case = replace(case, batch=1, s_q=4, lengths=(130, 0, 65, 200))
    assert len(bench.judge(case, *schedules(4, 0))) == 4


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
    case = replace(MIXED, s_q=3, lengths=None, sinks="none")
    tensors = make_sparse_prefill_tensors(case)
    expected = bench.run(case, tensors)
    offsets = torch.tensor([0, 300, 600], dtype=torch.int32)
    assert identical(bench.run(case, replace(tensors, kv=tensors.kv.flatten(0, 1), kv_offsets=offsets)), expected)
    for layout in ("layers", "far"):
        other = replace(case, kv_layout=layout, index_layout="odd", outputs="strided")  # type: ignore[arg-type]
        assert identical(bench.run(other), expected), layout


def test_another_seed_gives_other_bits(bench: Bench) -> None:
    case = replace(MIXED, s_q=2, lengths=None)
    assert not identical(bench.run(case), bench.run(replace(case, seed=1)))
