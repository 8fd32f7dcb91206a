"""Cases that no smoke suite draws, and one case of each kind of kernel under every schedule, on the simulated device.

`cute-mla verify` runs the smoke suites: shapes, layouts, strides, lengths, indices, values and unused memory of every variant.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from cute_mla.spec.dense_decode import FP8, FP8_CACHE, OPERANDS
from cute_mla.spec.mla import MAX_HEADS
from cute_mla.spec.sparse_decode import DECODED
from cute_mla.testing.cases.base import BaseCase
from cute_mla.testing.operations.dense_decode.case import DenseDecodeCase
from cute_mla.testing.operations.dense_prefill.case import DensePrefillCase
from cute_mla.testing.operations.dense_prefill_backward.case import DensePrefillBackwardCase
from cute_mla.testing.operations.sparse_decode.case import Pool, SparseDecodeCase
from cute_mla.testing.operations.sparse_prefill.case import SparsePrefillCase
from cute_mla.testing.runner import Schedule, schedules
from tests.support.bench import Bench

SPARSE_PREFILL = SparsePrefillCase(s_q=3, h_q=5, s_kv=100, topk=70, sm_count=2)
BACKWARD = DensePrefillBackwardCase(lengths=((20, 30), (9, 70)), ends="margins", outputs="given", sm_count=2)

# The extremes of softmax scales, of splits, of rows, and of requests on few SMs.
UNDRAWN: tuple[BaseCase, ...] = (
    DenseDecodeCase("fp16", batch=2, lengths=(130, 3), s_q=5, h_q=128, causal=True, outputs="strided", sm_count=4),
    DenseDecodeCase(batch=2, lengths=(200, 33), h_q=8, page_size=192, sm_count=2),
    DenseDecodeCase(batch=2, lengths=(200, 33), h_q=8, page_size=192, operands=FP8_CACHE, sm_count=2),
    DenseDecodeCase(batch=2, lengths=(700, 100), h_q=8, sm_count=132),
    DenseDecodeCase(batch=3, lengths=(300, 0, 100), h_q=80, operands=FP8, sm_count=132),
    DenseDecodeCase("fp16", batch=20, s_k=30, h_q=4, varlen=True, zero_lengths=True, sm_count=3),
    *(
        DenseDecodeCase(s_k=200, h_q=16, softmax_scale=scale, operands=operands, sm_count=2)
        for operands in OPERANDS
        for scale in (1e-4, 30.0)
    ),
    *(DenseDecodeCase(s_k=300, h_q=16, values="peaks", operands=operands, sm_count=5) for operands in OPERANDS),
    SparseDecodeCase(batch=2, h_q=8, main=Pool(700, 600, 64, (600, 100)), extra=Pool(200, 130), sinks="drawn", sm_count=148),
    SparseDecodeCase(cache="fp8_584", batch=15, h_q=4, main=Pool(60, 40, 64, "zeros"), indices="mixed", sm_count=3),
    SparseDecodeCase(cache="latent", batch=2, s_q=3, h_q=128, main=Pool(100, 70, 576), indices="mixed", sm_count=8),
    *(SparseDecodeCase(cache="fp8_584", h_q=16, main=Pool(200, 150), softmax_scale=scale, sm_count=2) for scale in (1e-4, 30.0)),
    SparseDecodeCase(h_q=16, main=Pool(300, 300), values="peaks", sm_count=4),
    SparseDecodeCase(h_q=16, main=Pool(300, 256), values="coherent", sm_count=2),  # rounded scales, to bf16 or to powers of two, show
    replace(SPARSE_PREFILL, s_q=9, h_q=128, lengths="edges", indices="mixed", sm_count=5),
    SparsePrefillCase(s_q=2, h_q=64, d_qk=512, s_kv=800, topk=500, values="amplified", softmax_scale=64.0, sm_count=2),
    *(replace(SPARSE_PREFILL, h_q=16, s_kv=300, topk=260, softmax_scale=scale) for scale in (1e-4, 1.0, 30.0)),
    DensePrefillCase(lengths=((17, 40), (40, 65)), h_kv=1, group=4, causal=True, sm_count=3),
    DensePrefillCase("fp16", d_qk=128, lengths=((17, 40), (40, 65)), h_kv=1, group=8, causal=True, sm_count=3),
    DensePrefillCase(d_qk=256, lengths=((65, 257), (1, 129), (130, 127), (17, 1)), causal=True, sm_count=2),
    DensePrefillCase(d_qk=192, lengths=((70, 400), (3, 140)), values="peaks", sm_count=1),
    *(DensePrefillCase(lengths=((65, 300),), softmax_scale=scale) for scale in (1e-4, 1.0, 30.0)),
    replace(BACKWARD, lengths=((1, 1), (0, 2), (3, 0), (0, 0), (2, 5)) * 6, causal=True, sm_count=3),
    replace(BACKWARD, lengths=((128, 63), (129, 257)), d_qk=256, causal=True),
)

EVERY_SIZE: tuple[BaseCase, ...] = (
    *(DenseDecodeCase(lengths=(70,), h_q=h_q, outputs="strided", sm_count=1) for h_q in range(1, MAX_HEADS + 1)),
    *(SparseDecodeCase(h_q=h_q, main=Pool(100, 70), outputs="strided", sm_count=1) for h_q in range(1, MAX_HEADS + 1)),
    *(replace(SPARSE_PREFILL, h_q=h_q, outputs="strided") for h_q in range(1, MAX_HEADS + 1)),
    *(
        DensePrefillCase(lengths=((size, 70), (70, size), (size, size)), causal=True, outputs="strided", sm_count=2)
        for size in range(1, 131)
    ),
)

DENSE = DenseDecodeCase(batch=3, s_q=2, lengths=(130, 20, 0), h_q=40, causal=True, page_size=32, values="peaks", sm_count=6)
SPARSE = SparseDecodeCase(
    batch=2, h_q=10, main=Pool(200, 70, 61, (70, 0)), extra=Pool(100, 40, 64, (40, 9)), indices="mixed", sinks="drawn", sm_count=6
)
VARLEN = DensePrefillCase(lengths=((65, 150), (3, 1), (9, 0)), group=2, causal=True, ends="clipped", sm_count=2)

SCHEDULED: tuple[BaseCase, ...] = (
    *(replace(DENSE, operands=operands) for operands in OPERANDS),
    DenseDecodeCase("fp16", lengths=(130,), h_q=128, page_size=32, values="rising", sm_count=4),
    DenseDecodeCase(batch=4, tokens=(2, 0, 1, 3), lengths=(70, 10, 130, 2), h_q=16, causal=True, outputs="given", sm_count=12),
    *(replace(SPARSE, cache=cache) for cache in DECODED),
    replace(SPARSE, cache="v41", extra_cache="v41_fp4"),
    SparseDecodeCase(cache="latent", batch=4, tokens=(1, 0, 3), main=Pool(140, 130, 62, (130, 0, 3, 500)), outputs="given", sm_count=12),
    SparsePrefillCase(s_q=4, h_q=10, s_kv=300, topk=200, lengths=(130, 0, 65, 200), indices="mixed", sinks="drawn", sm_count=4),
    SparsePrefillCase(d_qk=512, s_q=3, h_q=128, s_kv=300, topk=130, lengths=(130, 0, 65), indices="mixed", sm_count=4),
    VARLEN,
    replace(VARLEN, dtype="fp16", d_qk=128, q_layout="sliced", causal=False, values="falling"),
    replace(VARLEN, lengths=((65, 150), (0, 20), (3, 1)), group=1, mask="random", mask_layout="padded"),
    replace(BACKWARD, lengths=((70, 140), (9, 30)), causal=True),
    replace(BACKWARD, d_qk=128, lengths=((65, 70), (0, 3), (7, 0)), group=2),
    replace(BACKWARD, d_qk=256, lengths=((70, 65), (0, 3), (9, 0)), group=2, causal=True),
)


def named(case: BaseCase) -> str:
    """Return the identifier of a test's parameter."""
    return f"{case.op}-{case.id}"


@pytest.mark.in_turn
@pytest.mark.parametrize("case", UNDRAWN, ids=named)
def test_cases_that_no_suite_draws(bench: Bench, case: BaseCase) -> None:
    bench.judge(case)


@pytest.mark.slow
@pytest.mark.parametrize("case", EVERY_SIZE, ids=named)
def test_every_number_of_heads_and_of_tokens(bench: Bench, case: BaseCase) -> None:
    bench.judge(case)


@pytest.mark.in_turn
@pytest.mark.parametrize("case", SCHEDULED, ids=named)
def test_every_schedule_gives_the_same_bits(bench: Bench, case: BaseCase) -> None:
    assert len(bench.judge(case, *schedules(4, 0))) == 4


@pytest.mark.parametrize("operands", [FP8_CACHE, FP8])
def test_nothing_undefined_decides_a_branch_of_the_machine_code(bench: Bench, operands: str) -> None:
    """A work tile without keys has no sums, and a division is a branch there."""
    bench.judge(DenseDecodeCase(batch=2, lengths=(0, 70), h_q=8, operands=operands, sm_count=2), Schedule("round_robin", 0, "sass"))
