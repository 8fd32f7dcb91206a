"""Equal inputs on every architecture: the answers agree within FlashMLA's tolerances, and plans are interchangeable."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import cute_mla
from cute_mla.spec.arch import SM90, SM100, Arch
from cute_mla.testing.cases.dense_decode import DenseDecodeCase, DenseDecodeTensors, make_dense_decode_tensors
from cute_mla.testing.compare import DENSE_DECODE_OUT, LSE, compare, same_bits
from tests.support.bench import Bench, Result

CASES = (
    DenseDecodeCase(batch=3, s_q=2, lengths=(500, 0, 260), h_q=40, causal=True, sm_count=9),
    DenseDecodeCase("fp16", batch=2, lengths=(300, 65), h_q=128, page_size=32, values="rising", sm_count=6),
    DenseDecodeCase(
        batch=2, s_q=3, lengths=(140, 2), h_q=9, h_kv=3, page_size=16, causal=True, q_layout="odd", outputs="strided", sm_count=6
    ),
    DenseDecodeCase("fp16", batch=2, lengths=(1100, 70), h_q=16, values="peaks", softmax_scale=0.1, outputs="odd", sm_count=20),
    DenseDecodeCase(batch=2, lengths=(700, 31), h_q=64, values="falling", batch_invariant=True, sm_count=1),
)


def differences(result: Result, other: Result) -> list[str]:
    """Why two results do not agree."""
    pairs = zip(("out", "lse"), result, other, (DENSE_DECODE_OUT, LSE), strict=True)
    comparisons = (compare(name, mine, theirs.float(), tolerance) for name, mine, theirs, tolerance in pairs)
    return [comparison.reason for comparison in comparisons if not comparison.passed]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_the_architectures_agree(case: DenseDecodeCase) -> None:
    hopper, blackwell = (Bench(arch).run(case) for arch in (SM90, SM100))
    assert differences(blackwell, hopper) == []


def test_a_result_that_is_wrong_on_one_architecture_is_seen() -> None:
    case = CASES[0]
    out, lse = Bench(SM100).run(case)
    hopper = Bench(SM90).run(case)
    wrong = out.clone()
    wrong[0, 0, 0] *= 1.05
    assert differences((wrong, lse), hopper) != []
    assert differences((out, lse + 1e-2), hopper) != []


def planned(arch: Arch, tensors: DenseDecodeTensors) -> tuple[Tensor, Tensor]:
    """Return a plan for 80 query rows on 12 multiprocessors."""
    with cute_mla.simulate(arch, 12):
        return cute_mla.get_mla_metadata(tensors.cache_seqlens, 80, 1, 40)


def test_equal_numbers_of_parts_have_equal_plans() -> None:
    """80 rows are two CTAs on either architecture."""
    hopper, blackwell = (planned(arch, make_dense_decode_tensors(CASES[0])) for arch in (SM90, SM100))
    assert torch.equal(hopper[0], blackwell[0])
    assert torch.equal(hopper[1], blackwell[1])


def test_plans_have_as_many_parts_as_the_architecture_has_groups_of_ctas() -> None:
    lengths = torch.tensor([1000], dtype=torch.int32)
    for rows, parts in ((16, {SM90: 132, SM100: 74}), (128, {SM90: 66, SM100: 74}), (129, {SM90: 44, SM100: 37})):
        for arch, expected in parts.items():
            with cute_mla.simulate(arch):
                metadata, _ = cute_mla.get_mla_metadata(lengths, rows, 1)
                assert metadata.shape == (expected, 8)


def test_a_plan_of_one_architecture_serves_the_other(arch: Arch) -> None:
    other = SM90 if arch is SM100 else SM100
    case = CASES[0]
    tensors = make_dense_decode_tensors(case)
    results = []
    for planner in (arch, other):
        plan = planned(planner, tensors)
        with cute_mla.simulate(arch, 12):
            operands = (tensors.q, tensors.k_cache, tensors.block_table, tensors.cache_seqlens)
            results.append(cute_mla.flash_mla_with_kvcache(*operands, 512, *plan, causal=True))
    assert all(same_bits(mine, theirs) for mine, theirs in zip(*results, strict=True))
    assert differences(results[0], Bench(other).run(case)) == []
