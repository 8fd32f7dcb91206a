"""Sparse prefill on the simulated device over its shapes: heads, tokens, indices, forms of batch, layouts and values.

Types and widths of rows take turns, so that every variant is met without a call for each.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from cute_mla.spec.mla import MAX_HEADS
from cute_mla.testing.cases.sparse_prefill import SparsePrefillCase
from tests.support.bench import Bench

HEADS = (1, 3, 16, 48, 63, 64, 65, 96, 127, 128)
KINDS = tuple(product(("bf16", "fp16"), (576, 512)))

SMALL = SparsePrefillCase(s_q=3, h_q=5, s_kv=100, topk=70, sm_count=2)


def in_turn(count: int) -> list[tuple[str, int]]:
    """So many pairs of type and width."""
    return [KINDS[index % len(KINDS)] for index in range(count)]


@pytest.mark.parametrize(("h_q", "kind"), list(zip(HEADS, in_turn(len(HEADS)), strict=True)))
def test_heads(bench: Bench, h_q: int, kind: tuple[str, int]) -> None:
    bench.judge(replace(SMALL, dtype=kind[0], d_qk=kind[1], s_q=2, h_q=h_q, sinks="drawn"))


@pytest.mark.slow
@pytest.mark.parametrize("h_q", range(1, MAX_HEADS + 1))
def test_every_number_of_heads(bench: Bench, h_q: int) -> None:
    bench.judge(replace(SMALL, h_q=h_q, outputs="strided"))


TOPKS = (1, 63, 64, 65, 129, 200)


@pytest.mark.parametrize(("topk", "kind"), list(zip(TOPKS, in_turn(len(TOPKS)), strict=True)))
def test_numbers_of_indices(bench: Bench, topk: int, kind: tuple[str, int]) -> None:
    bench.judge(replace(SMALL, dtype=kind[0], d_qk=kind[1], s_kv=220, topk=topk))


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "d_qk"), KINDS)
@pytest.mark.parametrize("s_kv", [32, 4096])
def test_2048_indices(bench: Bench, dtype: str, d_qk: int, s_kv: int) -> None:
    bench.judge(replace(SMALL, dtype=dtype, d_qk=d_qk, s_kv=s_kv, topk=2048))


@pytest.mark.parametrize(("s_q", "h_q", "sm_count"), [(1, 16, 132), (2, 128, 2), (7, 16, 4), (9, 128, 5)])
def test_query_tokens(bench: Bench, s_q: int, h_q: int, sm_count: int) -> None:
    bench.judge(replace(SMALL, s_q=s_q, h_q=h_q, lengths="edges", indices="mixed", sm_count=sm_count))


@pytest.mark.parametrize(("form", "batch", "d_qk"), [("batched", 1, 576), ("batched", 3, 512), ("ragged", 4, 512), ("clipped", 4, 576)])
def test_forms_of_batch(bench: Bench, form: str, batch: int, d_qk: int) -> None:
    bench.judge(replace(SMALL, d_qk=d_qk, form=form, batch=batch, lengths="edges", indices="mixed", sinks="drawn"))  # type: ignore[arg-type]


@pytest.mark.parametrize(("kv_layout", "form"), [("padded_rows", "ragged"), ("layers", "single"), ("far", "batched")])
def test_layouts_of_kv(bench: Bench, kv_layout: str, form: str) -> None:
    bench.judge(replace(SMALL, batch=1 if form == "single" else 2, form=form, kv_layout=kv_layout, index_layout="odd"))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("q_layout", "outputs", "kind"),
    [
        ("sliced", "strided", ("bf16", 512)),
        ("odd", "given", ("fp16", 576)),
        ("even", "odd", ("bf16", 576)),
        ("heads_first", "strided", ("fp16", 512)),
    ],
)
def test_layouts_of_q_and_results(bench: Bench, q_layout: str, outputs: str, kind: tuple[str, int]) -> None:
    case = replace(SMALL, dtype=kind[0], d_qk=kind[1], h_q=70, q_layout=q_layout, outputs=outputs)  # type: ignore[arg-type]
    bench.judge(case)
    bench.judge(replace(case, batch=2, form="batched", s_q=1, h_q=9))


@pytest.mark.parametrize("values", ["rising", "falling", "peaks"])
def test_values(bench: Bench, values: str) -> None:
    bench.judge(replace(SMALL, s_q=2, h_q=16, s_kv=500, topk=400, values=values))  # type: ignore[arg-type]


@pytest.mark.parametrize(("dtype", "d_qk"), [("bf16", 576), ("fp16", 512)])
def test_rows_far_larger_than_the_others(bench: Bench, dtype: str, d_qk: int) -> None:
    bench.judge(SparsePrefillCase(dtype, s_q=2, h_q=64, d_qk=d_qk, s_kv=800, topk=500, values="amplified", softmax_scale=64.0, sm_count=2))


@pytest.mark.parametrize("scale", [1e-4, 1.0, 30.0])
def test_scales(bench: Bench, scale: float) -> None:
    """With 1, the maximum moves from tile to tile by less than what a lazily followed one would let pass."""
    bench.judge(replace(SMALL, h_q=16, s_kv=300, topk=260, softmax_scale=scale))
