"""The bits of the backward pass: equal under every schedule, and the same alone as in a batch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from cute_mla.testing.cases.dense_prefill_backward import DensePrefillBackwardCase, make_dense_prefill_backward_tensors
from cute_mla.testing.runner import schedules
from tests.support.bench import Bench, identical

CASES = (
    DensePrefillBackwardCase(lengths=((150, 140), (9, 30)), causal=True, sm_count=2),
    DensePrefillBackwardCase("fp16", d_qk=128, lengths=((65, 129), (0, 3), (7, 0)), h_kv=2, group=2, outputs="given", sm_count=3),
    DensePrefillBackwardCase(d_qk=256, lengths=((150, 140), (0, 3), (9, 0)), group=2, causal=True, outputs="given", sm_count=2),
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_every_schedule_gives_the_same_bits(bench: Bench, case: DensePrefillBackwardCase) -> None:
    bench.judge(case, *schedules(4, 0))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_a_sequence_alone_has_the_bits_that_it_has_in_a_batch(bench: Bench, case: DensePrefillBackwardCase) -> None:
    """Also on another number of SMs."""
    tensors = make_dense_prefill_backward_tensors(case)
    dq, dk, dv = bench.run(case, tensors)
    rows, keys = (slice(starts[0], starts[1]) for starts in (case.q_starts, case.k_starts))
    own = {name: getattr(tensors, name)[rows] for name in ("q", "dout", "out", "lse")}
    own |= {name: getattr(tensors, name)[keys] for name in ("k", "v")}
    ends = {f"cu_seqlens_{name}": torch.tensor([0, length], dtype=torch.int32) for name, length in zip("qk", case.lengths[0], strict=True)}
    alone = replace(case, sm_count=1, outputs="allocated")
    result = bench.run(alone, replace(tensors, **own, **ends, output_buffers={}))
    assert identical(result, (dq[rows], dk[keys], dv[keys]))


def test_bits_depend_on_no_layout(bench: Bench) -> None:
    case = DensePrefillBackwardCase(lengths=((70, 140), (9, 30)), h_kv=2, group=2, causal=True, ends="clipped", sm_count=2)
    expected = bench.run(case)
    for layouts in (
        {"q_layout": "sliced", "dout_layout": "heads_first", "kv_layout": "kvpacked", "outputs": "strided"},
        {"q_layout": "heads_first", "dout_layout": "sliced", "saved": "strided", "kv_layout": "heads_first", "outputs": "given"},
    ):
        assert identical(bench.run(replace(case, **layouts)), expected)  # type: ignore[arg-type]
