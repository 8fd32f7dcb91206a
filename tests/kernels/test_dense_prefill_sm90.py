"""The dense prefill kernel of SM90 alone on the simulator, against fp32 attention."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from launching import CompiledKernel
from prefill_problem import Problem

from cute_mla import simulator
from cute_mla.spec.arch import SM90
from cute_mla.spec.dense_prefill import DensePrefillConfig

pytest.importorskip("cutlass", reason="the CuTe DSL (build extra) is not installed")

WIDE = DensePrefillConfig("bf16", 192, 16)
ELEMENTS = DensePrefillConfig("fp16", 128, 2)
SCHEDULES = ("round_robin", "lazy", "random", "adversarial")


@cache
def kernel(config: DensePrefillConfig) -> CompiledKernel:
    from cute_mla.aot_build.compile import compile_source
    from cute_mla.kernels.dense_prefill.sm90 import build

    source = build(config, SM90)
    result = compile_source(source, SM90)
    return CompiledKernel(source, result.entry, result.ptx)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("ctas", "schedule"), [(1, "round_robin"), (2, "lazy"), (3, "random"), (1, "adversarial")])
def test_sequences_of_all_sorts(ctas: int, schedule: str, causal: bool) -> None:
    """Several items per CTA; rows that see nothing, sequences without queries or keys, keys shared by heads, and scores whose
    row maximum moves by more than 2^8 now and then."""
    problem = Problem([(257, 129), (0, 5), (64, 0), (17, 300)], "sm90", causal, group=4, config=WIDE, spread=2.0)
    assert not problem.faults(kernel(WIDE), ctas, simulator.Policy.named(schedule, 1))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_rows_at_any_element(schedule: str) -> None:
    problem = Problem([(129, 127), (1, 1), (64, 128)], "sm90", h_kv=2, config=ELEMENTS, spread=2.0)
    assert not problem.faults(kernel(ELEMENTS), 2, simulator.Policy.named(schedule, 1))


@pytest.mark.parametrize("offsets", [(5, 2, 3), (-7, 1 << 30, 90), ((1 << 31) - 1, -(1 << 31), 40), (-(1 << 31), (1 << 31) - 1, 1)])
def test_no_offsets_lead_outside(offsets: tuple[int, int, int]) -> None:
    """Whatever they are, the kernel ends, and stays within its operands."""
    problem = Problem([(130, 200), (1, 60)], "sm90", config=WIDE)
    problem.cu_q = torch.tensor(offsets, dtype=torch.int32)
    for keys in (offsets, offsets[::-1]):
        problem.cu_k = torch.tensor(keys, dtype=torch.int32)
        assert not problem.run(kernel(WIDE), 2)


@pytest.mark.parametrize(
    ("pattern", "replacement"),
    [
        pytest.param(r"selp\.f32 \t(%r\d+), \1, 0fFF800000, %p\d+;", "", id="no row is masked"),
        pytest.param(r"st\.shared\.v4\.b32 .*\{0, 0, 0, 0\};", "", id="values past the end are not cleared"),
        pytest.param(r"fence\.proxy\.async", "// fence.proxy.async", id="nor published"),
        pytest.param(r"(wgmma\.wait_group\.sync\.aligned\s+)0", r"\g<1>1", id="P V is not waited for"),
        pytest.param(r"bar(rier)?\.sync\s+%r\d+, 256;", "", id="nobody waits for a turn"),
        pytest.param(r"mov\.b32 (\t%r\d+), 32768;", r"mov.b32 \1, 16384;", id="half a tile of V is waited for"),
    ],
)
def test_planted_bugs_are_found(pattern: str, replacement: str) -> None:
    broken = kernel(WIDE).edited(pattern, replacement)
    assert Problem([(140, 129), (64, 257)], "sm90", config=WIDE, spread=2.0).faults(broken, policy=simulator.Policy.named("lazy"))
