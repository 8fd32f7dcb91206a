"""Dense prefill on the simulated device over its shapes: lengths, heads, layouts and values.

Types and numbers of columns take turns, so that every variant is met without a call for each.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from cute_mla.testing.cases.dense_prefill import DensePrefillCase
from tests.support.bench import Bench

KINDS = (*product(("bf16", "fp16"), (192, 128)), ("bf16", 256))
LENGTHS = (1, 17, 63, 64, 65, 127, 128, 129, 257)

SMALL = DensePrefillCase(lengths=((65, 129), (17, 9)), sm_count=2)


def in_turn(count: int) -> list[tuple[str, int]]:
    """So many pairs of type and number of columns."""
    return [KINDS[index % len(KINDS)] for index in range(count)]


@pytest.mark.parametrize(("length", "kind"), list(zip(LENGTHS, in_turn(len(LENGTHS)), strict=True)))
def test_as_many_keys_as_query_tokens(bench: Bench, length: int, kind: tuple[str, int]) -> None:
    for causal in (True, False):
        bench.judge(DensePrefillCase(kind[0], d_qk=kind[1], lengths=((length, length),), causal=causal))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("dtype", "d_qk"), [("bf16", 128), ("fp16", 192)])
def test_other_numbers_of_keys(bench: Bench, dtype: str, d_qk: int, causal: bool) -> None:
    """A chunk behind a context; more query tokens than keys."""
    lengths = ((65, 257), (1, 129), (130, 127), (17, 1))
    bench.judge(replace(SMALL, dtype=dtype, d_qk=d_qk, lengths=lengths, causal=causal))


HEADS = ((1, 4), (5, 1), (2, 3), (1, 8))


@pytest.mark.parametrize(("heads", "kind"), list(zip(HEADS, in_turn(len(HEADS)), strict=True)))
def test_heads(bench: Bench, heads: tuple[int, int], kind: tuple[str, int]) -> None:
    h_kv, group = heads
    bench.judge(DensePrefillCase(kind[0], d_qk=kind[1], lengths=((17, 40), (40, 65)), h_kv=h_kv, group=group, causal=True, sm_count=3))


@pytest.mark.slow
@pytest.mark.parametrize("length", range(1, 131))
def test_every_length(bench: Bench, length: int) -> None:
    bench.judge(replace(SMALL, lengths=((length, 70), (70, length), (length, length)), causal=True, outputs="strided"))


@pytest.mark.parametrize(
    ("q_layout", "outputs", "kv_layout", "kind"),
    [
        ("sliced", "strided", "padded", ("bf16", 128)),
        ("odd", "given", "kvpacked", ("fp16", 192)),
        ("even", "odd", "heads_first", ("bf16", 192)),
        ("heads_first", "strided", "kvpacked", ("fp16", 128)),
    ],
)
def test_layouts(bench: Bench, q_layout: str, outputs: str, kv_layout: str, kind: tuple[str, int]) -> None:
    layouts = {"q_layout": q_layout, "outputs": outputs, "kv_layout": kv_layout}
    bench.judge(replace(SMALL, dtype=kind[0], d_qk=kind[1], h_kv=2, group=2, **layouts))  # type: ignore[arg-type]


@pytest.mark.parametrize(("values", "d_qk"), [("rising", 192), ("falling", 128), ("peaks", 192)])
def test_values(bench: Bench, values: str, d_qk: int) -> None:
    bench.judge(DensePrefillCase(d_qk=d_qk, lengths=((70, 400), (3, 140)), values=values, sm_count=1))  # type: ignore[arg-type]


@pytest.mark.parametrize("scale", [1e-4, 1.0, 30.0])
def test_scales(bench: Bench, scale: float) -> None:
    """With 1, the maximum moves from tile to tile by less than what a lazily followed one would let pass."""
    bench.judge(DensePrefillCase(lengths=((65, 300),), softmax_scale=scale))
