"""The dense prefill kernel of SM100 alone on the simulator, against fp32 attention."""

from __future__ import annotations

from functools import cache

import pytest
from launching import CompiledKernel
from prefill_problem import Problem

from cute_mla import simulator
from cute_mla.spec.arch import SM100
from cute_mla.spec.dense_prefill import DensePrefillConfig

pytest.importorskip("cutlass", reason="the CuTe DSL (build extra) is not installed")

WIDE = DensePrefillConfig("bf16", 192, 16)
MIXED = [(257, 129), (1, 17), (0, 64), *[(20, 0)] * 5, (128, 128), (17, 1)]  # (s_q, s_k)


@cache
def kernel(config: DensePrefillConfig) -> CompiledKernel:
    from cute_mla.aot_build.compile import compile_source
    from cute_mla.kernels.dense_prefill.sm100 import build

    source = build(config, SM100)
    result = compile_source(source, SM100)
    return CompiledKernel(source, result.entry, result.ptx)


@pytest.mark.parametrize("schedule", ["round_robin", "lazy", "random", "adversarial"])
@pytest.mark.parametrize("causal", [False, True])
def test_sequences_of_all_sorts_one_after_another(schedule: str, causal: bool) -> None:
    """One CTA takes them all: the pipelines go on from item to item, with Q tiles that have no rows, and more
    items without keys in a row than may be posted ahead."""
    problem = Problem(MIXED, "sm100", causal, config=WIDE)
    assert problem.faults(kernel(WIDE), policy=simulator.Policy.named(schedule, 1)) == []


def test_heads_that_share_keys_and_a_moving_maximum() -> None:
    problem = Problem([(129, 300), (64, 127)], "sm100", h_kv=2, group=4, spread=3.0, config=WIDE)
    assert problem.faults(kernel(WIDE), ctas=3) == []


def test_any_strides_of_queries_and_output() -> None:
    config = DensePrefillConfig("fp16", 128, 2)
    assert Problem(MIXED, "sm100", config=config).faults(kernel(config), ctas=2) == []


@pytest.mark.parametrize(
    ("bug", "pattern", "replacement"),
    [
        ("values past the end are not cleared", r"st\.shared\.v4\.b32 .*\{0, 0, 0, 0\};", ""),
        ("P is handed over before it is stored", r"tcgen05\.wait::st\.sync\.aligned;", ""),
        ("no row is masked", r"selp\.f32 \t(%r\d+), 0fFF800000, (%r\d+), %p\d+;", r"mov.b32 \1, \2;"),
        ("a softmax that does not wait for its scores", r"tcgen05\.commit[^;]*;", ""),
    ],
)
def test_planted_bugs_are_found(bug: str, pattern: str, replacement: str) -> None:
    broken = kernel(WIDE).edited(pattern, replacement)
    assert Problem([(257, 129), (129, 300)], "sm100", config=WIDE, spread=3.0).faults(broken), bug
