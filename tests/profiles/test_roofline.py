"""The formulas against the limits worked out by hand for the standard shapes, and the rows against the formulas."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cute_mla.profiles.roofline import GPUS, Gpu, Work, gpus_of, roof
from cute_mla.profiles.rows import Case, every_case
from cute_mla.profiles.shapes import (
    CacheWriteShape,
    CombineShape,
    DecodeShape,
    DensePrefillShape,
    MergeShape,
    SparseDecodeShape,
    SparsePrefillShape,
    TopkShape,
)
from cute_mla.spec.arch import ARCHS, SM90, SM100
from cute_mla.spec.dense_decode import FP8, FP8_CACHE

CASES = every_case()


def shape(batch: int, length: int, h_q: int, s_q: int) -> DecodeShape:
    return DecodeShape(lengths=(length,) * batch, s_q=s_q, h_q=h_q)


# GFLOP, then microseconds and what binds on H800 and H200
STANDARD = [
    (shape(128, 4096, 128, 1), 146, (213, "memory"), (185, "compute")),
    (shape(128, 4096, 128, 2), 292, (338, "compute"), (370, "compute")),
    (shape(128, 4096, 64, 1), 73, (207, "memory"), (145, "memory")),
    (shape(128, 4096, 64, 2), 146, (213, "memory"), (185, "compute")),
    (shape(128, 4096, 16, 1), 18, (203, "memory"), (142, "memory")),
    (shape(128, 4096, 16, 2), 37, (204, "memory"), (143, "memory")),
    (shape(128, 4096, 16, 4), 73, (207, "memory"), (145, "memory")),
    (shape(1, 131072, 128, 1), 37, (50, "memory"), (46, "compute")),
    (shape(1, 131072, 16, 1), 4.6, (50, "memory"), (35, "memory")),
]


@pytest.mark.parametrize(("problem", "gflop", "h800", "h200"), STANDARD)
def test_dense_decode_has_the_known_limits(problem: DecodeShape, gflop: float, h800: tuple[float, str], h200: tuple[float, str]) -> None:
    work = problem.work
    assert work.flops / 1e9 == pytest.approx(gflop, rel=0.02)
    for name, (microseconds, bound) in (("H800", h800), ("H200", h200)):
        found = roof(work, GPUS[name])
        assert found.us == pytest.approx(microseconds, abs=0.6)
        assert found.bound == bound


# microseconds on an H200, where products of e4m3 take half as long
E4M3 = [(128, 1, FP8, 92, "compute"), (64, 1, FP8, 73, "memory"), (16, 1, FP8, 71, "memory"), (128, 1, FP8_CACHE, 185, "compute")]


@pytest.mark.parametrize(("h_q", "s_q", "operands", "microseconds", "bound"), E4M3)
def test_dense_decode_of_e4m3_has_the_known_limits(h_q: int, s_q: int, operands: str, microseconds: float, bound: str) -> None:
    found = roof(replace(shape(128, 4096, h_q, s_q), operands=operands).work, GPUS["H200"])
    assert found.us == pytest.approx(microseconds, abs=0.6)
    assert found.bound == bound


def test_dense_decode_of_e4m3_counts_every_byte_once() -> None:
    one_key = DecodeShape(lengths=(1,), s_q=1, h_q=1)
    assert replace(one_key, operands=FP8).work.bytes == 576 + 576 + 512 * 2 + 4 + 4
    assert replace(one_key, operands=FP8_CACHE).work.bytes == 576 + 576 * 2 + 512 * 2 + 4 + 4


def test_dense_decode_counts_every_byte_once() -> None:
    one_key = DecodeShape(lengths=(1,), s_q=1, h_q=1).work
    assert one_key == Work(flops=2 * 576 + 2 * 512, bytes=576 * 2 + 576 * 2 + 512 * 2 + 4 + 4)  # key, q, out, lse, page
    two_caches = DecodeShape(lengths=(1,), s_q=1, h_q=2, h_kv=2).work
    assert two_caches.bytes == 2 * (576 * 2 * 2 + 512 * 2 + 4) + 4
    assert two_caches.flops == 2 * one_key.flops


def test_an_empty_request_costs_its_rows_only() -> None:
    work = DecodeShape(lengths=(0, 64), s_q=1, h_q=16).work
    assert work.flops == 2176 * 16 * 64
    assert work.bytes == 64 * 1152 + 2 * 16 * 2180 + 4


@pytest.mark.parametrize(("splits", "batch", "heads", "us"), [(2, 128, 128, {"H800": 28, "H200": 20}), (64, 1, 16, {"H200": 0.5})])
def test_combine_has_the_known_limits(splits: int, batch: int, heads: int, us: dict[str, float]) -> None:
    work = CombineShape(batch=batch, s_q=1, h_q=heads, splits=splits).work
    assert work.bytes == batch * heads * (2052 * splits + 1024)
    for name, microseconds in us.items():
        found = roof(work, GPUS[name])
        assert found.us == pytest.approx(microseconds, rel=0.03)
        assert found.bound == "memory"


# The suite's formulas, by hand, and microseconds on an H200
SPARSE_DECODE = [(128, 2, 128, 185, "compute"), (128, 1, 64, 46, "compute"), (128, 1, 16, 41, "memory"), (2, 2, 128, 2.9, "compute")]


@pytest.mark.parametrize(("batch", "s_q", "h_q", "microseconds", "bound"), SPARSE_DECODE)
def test_sparse_decode_has_the_known_limits(batch: int, s_q: int, h_q: int, microseconds: float, bound: str) -> None:
    work = SparseDecodeShape(batch=batch, s_q=s_q, h_q=h_q, topk=2048, context=32768).work
    assert work.flops == 2176 * batch * s_q * h_q * 2048
    assert work.bytes == batch * s_q * (660 * 2048 + 2180 * h_q)
    found = roof(work, GPUS["H200"])
    assert (found.us, found.bound) == (pytest.approx(microseconds, abs=0.6), bound)


@pytest.mark.parametrize(("cache", "row_bytes", "flops"), [("latent", 1152, 2176), ("fp8_584", 584, 2048)])
def test_sparse_decode_of_other_caches_counts_their_rows(cache: str, row_bytes: int, flops: int) -> None:
    work = SparseDecodeShape(batch=1, s_q=1, h_q=0, topk=3, context=9, cache=cache).work
    assert work.bytes == 3 * (row_bytes + 4)
    assert SparseDecodeShape(batch=1, s_q=1, h_q=1, topk=1, context=9, cache=cache).work.flops == flops


def test_sparse_prefill_has_the_known_limits() -> None:
    work = SparsePrefillShape(s_q=4096, h_q=128, s_kv=131072, topk=2048).work
    assert work.flops == 2176 * 128 * 2048 * 4096
    assert work.bytes == 1152 * 131072 + 4096 * (2184 * 128 + 4 * 2048)
    assert [round(roof(work, GPUS[name]).us) for name in ("H800", "H200", "B200")] == pytest.approx([2701, 2957, 1038], abs=1.1)


# microseconds on H800, H200 and B200, of 8,192 tokens and 128 heads
@pytest.mark.parametrize(("causal", "microseconds"), [(True, (3178, 3480, 1222)), (False, (6356, 6959, 2443))])
def test_dense_prefill_has_the_known_limits(causal: bool, microseconds: tuple[int, ...]) -> None:
    work = DensePrefillShape(lengths=(8192,), h_q=128, h_kv=128, causal=causal).work
    assert [round(roof(work, GPUS[name]).us) for name in ("H800", "H200", "B200")] == pytest.approx(microseconds, abs=1.1)


def test_dense_prefill_counts_the_pairs_of_each_sequence_and_every_byte_once() -> None:
    causal = DensePrefillShape(lengths=(1, 3), h_q=2, h_kv=1, causal=True).work
    assert causal.flops == 640 * 2 * (1 + 6)
    assert causal.bytes == 4 * (2 * (2 * 192 + 2 * 128 + 4) + 2 * (192 + 128))
    assert DensePrefillShape(lengths=(1, 3), h_q=2, h_kv=1, causal=False).work.flops == 640 * 2 * (1 + 9)


def test_a_mask_leaves_the_pairs_that_it_shows() -> None:
    """Sequences of 1 and 3 tokens behind 2 keys, of which a mask shows 4 at most; a word of mask a token."""
    causal, full = (DensePrefillShape(lengths=(1, 3), h_q=2, h_kv=1, causal=causal, cached=2, shown=4) for causal in (True, False))
    assert causal.work.flops == 640 * 2 * (3 + 3 + 4 + 4)
    assert full.work.flops == 640 * 2 * (3 + 4 + 4 + 4)
    assert causal.work.bytes == 4 * (2 * (2 * 192 + 2 * 128 + 4) + 4) + 2 * (4 + 4) * (192 + 128)
    assert causal.text == "b2 L1-3 (mean 2) after 2 h2/1 causal shown4"


def test_merge_states_counts_every_byte_once() -> None:
    work = MergeShape(tokens=3, h_q=2, states=4).work
    assert work.bytes == 3 * 2 * 5 * (2 * 512 + 4)


def test_writing_keys_counts_every_byte_once() -> None:
    assert CacheWriteShape(tokens=3, cache="latent").work.bytes == 3 * (1152 + 8 + 1152)
    assert CacheWriteShape(tokens=3, cache="fp8_656").work.bytes == 3 * (1152 + 8 + 656)
    assert CacheWriteShape(tokens=3, cache="fp8_584").work.bytes == 3 * (1024 + 8 + 584)


def test_selecting_positions_counts_every_byte_once() -> None:
    work = TopkShape(rows=3, columns=100, topk=7).work
    assert (work.flops, work.bytes) == (0, 3 * (4 * 100 + 4 + 4 * 7))


def test_the_ridge_divides_memory_from_compute() -> None:
    gpu = Gpu("toy", arch="sm90", tflops=100.0, tbytes=1.0, source="made up")
    assert gpu.ridge == 100.0
    assert roof(Work(flops=99.0, bytes=1.0), gpu).bound == "memory"
    assert roof(Work(flops=101.0, bytes=1.0), gpu).bound == "compute"


@pytest.mark.parametrize(
    ("h_q", "s_q", "hopper", "blackwell"),
    [
        (128, 1, 1, 1), (64, 1, 1, 2), (32, 1, 2, 4), (16, 1, 4, 8), (16, 4, 1, 2), (8, 1, 8, 16), (96, 1, 4 / 3, 4 / 3), (96, 2, 1, 4 / 3),
    ],
)  # fmt: skip
def test_tiles_of_64_rows_and_pairs_of_them_pad_few_heads(h_q: int, s_q: int, hopper: float, blackwell: float) -> None:
    for arch, factor in ((SM90, hopper), (SM100, blackwell)):
        assert shape(1, 64, h_q, s_q).tile_padding(arch) == pytest.approx(factor)


@pytest.mark.parametrize(("problem", "microseconds", "bound"), [
    (shape(128, 4096, 128, 1), 80, "memory"), (shape(128, 4096, 128, 2), 130, "compute"), (shape(128, 4096, 16, 4), 78, "memory"),
    (shape(1, 131072, 128, 1), 19, "memory"),
])  # fmt: skip
def test_dense_decode_has_the_known_limits_on_a_b200(problem: DecodeShape, microseconds: float, bound: str) -> None:
    found = roof(problem.work, GPUS["B200"])
    assert found.us == pytest.approx(microseconds, abs=0.6)
    assert found.bound == bound


def test_gpus_belong_to_an_architecture() -> None:
    assert [gpu.name for gpu in gpus_of([SM90])] == ["H200", "H100", "H800"]
    assert [gpu.name for gpu in gpus_of([SM100])] == ["B200", "B300"]
    assert gpus_of(list(ARCHS.values())) == list(GPUS.values())


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_each_row_records_the_roofline_that_the_formula_gives(case: Case) -> None:
    assert case.roof_us == pytest.approx(roof(case.work, GPUS[case.roof_gpu]).us, rel=1e-3)
