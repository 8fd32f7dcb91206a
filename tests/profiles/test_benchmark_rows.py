"""The definition files: what they hold, how they are read, and what a damaged one says."""

from __future__ import annotations

from typing import Any

import pytest

from cute_mla.api import is_supported
from cute_mla.profiles.rows import OPS, Published, by_priority, every_case, load, parse, select, varlen_lengths
from cute_mla.profiles.shapes import DecodeShape, DensePrefillShape, SparseDecodeShape
from cute_mla.spec import dense_prefill, sparse_prefill
from cute_mla.spec.cache_rows import CACHED
from cute_mla.spec.dense_decode import OPERANDS
from cute_mla.spec.kernel_ops import ARCHS_OF
from cute_mla.spec.mla import DENSE_DIMS
from cute_mla.spec.sparse_decode import DECODED, DECODED_BESIDE

WRITERS = ("cache_write", "cache_insert", "index_write")
GOOD = """
op = "dense_decode"
dtype = "bf16"
page_size = 64
seed = 1
roof_gpu = "H200"
[[row]]
name = "A"
title = "a row"
priority = 2
cases = [{ name = "x", batch = 2, length = 64, s_q = 1, h_q = 16, roof_us = 1.0 }]
[[row]]
name = "B"
title = "another"
priority = 1
cases = [{ name = "y", lengths = [5, 6], s_q = 2, h_q = 8, h_kv = 2, roof_us = 1.0, goal_us = 3 }]
"""


def test_the_suite_has_every_row_once() -> None:
    cases = load("dense_decode")
    assert list(dict.fromkeys(case.row for case in cases)) == [
        *(f"D{number}" for number in range(1, 16)),
        *("F1", "F2", "F3", "D16", "D17", "D18"),
        *(f"O{number}" for number in range(1, 6)),
    ]
    rows = {op: list(dict.fromkeys(case.row for case in load(op))) for op in OPS if op != "dense_decode"}
    assert rows == {
        "sparse_decode": ["S1", "S2", "S3", "S4", "S5", "S6", "S7", "S8", "O6", "O7", "O8"],
        "sparse_prefill": ["P1", "P2", "P3"],
        "sparse_prefill_backward": ["P4", "P5"],
        "dense_prefill": ["M1", "M3", "M4", "M7"],
        "dense_prefill_backward": ["M2", "M5", "M6"],
        "combine": ["C1"],
        "merge_states": ["C2"],
        "cache_write": ["K1", "K2"],
        "cache_insert": ["K3", "K4"],
        "index_write": ["K5"],
        "topk_indices": ["X1"],
        "indexer_topk": ["X2"],
    }
    names = [case.name for case in every_case()]
    assert len(set(names)) == len(names)


def test_parse_reads_lengths_shapes_and_goals() -> None:
    first, second = parse(GOOD)
    assert (first.name, first.shape, first.goal_us) == ("A.x", DecodeShape(lengths=(64, 64), s_q=1, h_q=16), None)
    assert (second.name, second.shape, second.goal_us) == ("B.y", DecodeShape(lengths=(5, 6), s_q=2, h_q=8, h_kv=2), 3)


def test_times_of_others_are_read_with_their_gpu_and_source() -> None:
    of_row = 'published_on = "B200"\nsource = "a page"\ncases = [{'
    of_case = "roof_us = 1.0, published = { Theirs = 2.0, Others = 3.0 } }"
    theirs = GOOD.replace("cases = [{", of_row, 1).replace("roof_us = 1.0 }", of_case, 1)
    first, second = parse(theirs)
    assert (first.published, second.published) == (Published((("Theirs", 2.0), ("Others", 3.0)), "B200", "a page"), None)


def test_rows_run_by_priority_which_a_case_may_have_of_its_own() -> None:
    assert [case.name for case in by_priority(parse(GOOD))] == ["B.y", "A.x"]
    hurried = GOOD.replace("h_q = 16, roof_us", "h_q = 16, priority = 0, roof_us")
    assert [case.name for case in by_priority(parse(hurried))] == ["A.x", "B.y"]


def test_the_forty_most_telling_rows_come_first_and_cover_every_op() -> None:
    """Rows of priority 1 and 2: those that fit in 200 s of a GPU (docs/performance.md)."""
    cases = every_case()
    first = by_priority(cases)[:40]
    assert {case.priority for case in first} == {1, 2}
    assert {case.priority for case in cases if case not in first}.isdisjoint({1, 2})
    assert {case.op for case in first} == set(OPS)


def test_varlen_lengths_depend_on_the_seed_alone_and_are_clipped() -> None:
    lengths = varlen_lengths(2000, 4096, 4, seed=7)
    assert lengths == varlen_lengths(2000, 4096, 4, seed=7)
    assert lengths != varlen_lengths(2000, 4096, 4, seed=8)
    assert min(lengths) == 4
    assert sum(lengths) / len(lengths) == pytest.approx(4096, rel=0.05)
    assert sum(length > 6144 for length in lengths) / len(lengths) == pytest.approx(0.16, abs=0.03)  # one deviation above


def test_varlen_rows_hold_their_lengths() -> None:
    (case,) = select(load("dense_decode"), ["D1.varlen"])
    assert isinstance(case.shape, DecodeShape)
    assert (case.shape.batch, case.shape.keys) == (128, 502_771)


def test_select_by_row_and_by_case() -> None:
    cases = load("dense_decode")
    assert [case.name for case in select(cases, ["D6.s2", "D1"])] == ["D1.fixed", "D1.varlen", "D6.s2"]
    with pytest.raises(ValueError, match=r"no row or case named D77; rows: D1, D2,.*D1\.fixed"):
        select(cases, ["D1", "D77"])


@pytest.mark.parametrize(
    ("old", "new", "error"), [("h_q = 16, ", "", TypeError), ("s_q = 1,", "s_q = 1, topk = 8,", TypeError), ("seed = 1", "", KeyError)]
)
def test_keys_that_are_missing_or_unknown_are_errors(old: str, new: str, error: type[Exception]) -> None:
    with pytest.raises(error, match=r"h_q|topk|seed"):
        parse(GOOD.replace(old, new))


def test_shapes_of_every_op_are_read() -> None:
    (sparse,) = select(load("sparse_decode"), ["S3.h16"])
    assert sparse.shape == SparseDecodeShape(batch=128, s_q=1, h_q=16, topk=2048, context=32768)
    full, varlen = select(load("dense_prefill"), ["M1.8k_full", "M1.16x1k"])
    assert full.shape == DensePrefillShape(lengths=(8192,), h_q=128, h_kv=128, causal=False)
    assert isinstance(varlen.shape, DensePrefillShape)
    assert (varlen.shape.batch, len(set(varlen.shape.lengths)), min(varlen.shape.lengths) >= 1) == (16, 16, True)


@pytest.mark.parametrize("op", [op for op in OPS if op not in ("combine", "merge_states", *WRITERS, "topk_indices", "indexer_topk")])
def test_rows_are_problems_that_the_kernels_support(op: str) -> None:
    for case in load(op):
        features = {name: getattr(case.shape, name) for name in ("s_q", "h_q", "h_kv", "topk", "page_size") if hasattr(case.shape, name)}
        for arch in ARCHS_OF[op]:
            assert is_supported(op, arch.name, dtype=case.dtype, **features)[0], case.name


def test_every_format_and_every_number_of_columns_has_a_row() -> None:
    """Everything that ships for an architecture is timed on it: each cache format, also as second cache, and each number of columns."""
    shapes: dict[str, list[Any]] = {op: [case.shape for case in load(op)] for op in OPS}
    assert {shape.d_qk for shape in shapes["dense_decode"]} == set(DENSE_DIMS)
    assert {shape.operands for shape in shapes["dense_decode"]} == set(OPERANDS)
    assert {shape.cache for shape in shapes["sparse_decode"]} == set(DECODED)
    assert {shape.extra for shape in shapes["sparse_decode"]} >= set(DECODED_BESIDE) - set(DECODED)
    assert {shape.d_qk for shape in shapes["sparse_prefill"]} == set(sparse_prefill.HEAD_DIMS)
    assert {shape.d_qk for shape in shapes["sparse_prefill_backward"]} == set(sparse_prefill.HEAD_DIMS)
    assert {shape.d_qk for shape in shapes["dense_prefill"]} == set(dense_prefill.HEAD_DIMS)
    assert {shape.d_qk for shape in shapes["dense_prefill_backward"]} == set(dense_prefill.HEAD_DIMS)
    assert {shape.cache for shape in shapes["cache_write"]} == {shape.cache for shape in shapes["cache_insert"]} == set(CACHED)
    assert {shape.h_q > 0 for shape in shapes["index_write"]} == {True, False}


def test_the_least_work_of_an_indexer() -> None:
    """Keys of 132 bytes and an entry of 4 a page of 64; 64 heads of 132 bytes, and 2,048 positions. Keys in a row count once."""
    (paged,), (rows,) = (select(load("indexer_topk"), [name]) for name in ("X2.64x64k", "X2.4096x128k"))
    assert paged.work.bytes == 64 * (65536 * 132 + 65536 // 64 * 4 + 64 * 132 + 2048 * 4)
    assert rows.work.bytes == 131072 * 132 + 4096 * (64 * 132 + 2048 * 4)
    assert rows.work.flops == 2 * 128 * 64 * 4096 * 131072
    assert (paged.text, rows.text) == ("b64 topk2048 of 65536 h64", "tokens4096 topk2048 of 131072 h64")


def test_the_least_work_of_writers() -> None:
    """Count for a token of K3 1,152 bytes of key, 656 of the cache, 8 of slot, 8 of position, 256 of angles, 16 queries of 128 in and out.

    For a token of K5: 256 of key, 132 of the cache, 8, 8 and 256; of 64 queries 256 in, 128 of codes and 8 of weights each, 8 and 256.
    Weights of norms are 512 elements of bf16, and 256 of fp32.
    """
    (insert,), (keys, queries) = (
        select(load("cache_insert"), ["K3.656_128_h16"]),
        select(load("index_write"), ["K5.keys_128", "K5.h64_128"]),
    )
    assert insert.work.bytes == 128 * (1152 + 656 + 8 + 8 + 256 + 16 * 256) + 1024
    assert keys.work.bytes == 128 * (256 + 132 + 8 + 8 + 256) + 1024
    assert queries.work.bytes == 128 * (64 * (256 + 128 + 8) + 8 + 256)
    (bare,) = select(load("cache_insert"), ["K4.latent_512"])
    assert bare.work.bytes == 4096 * (1024 + 1024 + 8) + 1024
    assert (insert.text, keys.text, queries.text) == ("tokens128 h16 fp8_656", "tokens128 keys", "tokens128 h64")


def test_the_keys_of_a_second_cache_count() -> None:
    """128 keys of 528 bytes and 512 of 288, beside indices of 4 bytes; q of 512 columns, out and lse of 64 heads."""
    (case,) = select(load("sparse_decode"), ["S5.v41_fp4"])
    assert case.work.flops == 128 * 64 * 640 * 2 * (512 + 512)
    assert case.work.bytes == 128 * (128 * (528 + 4) + 512 * (288 + 4) + 64 * (2 * 512 + 2 * 512 + 4))
    assert case.text == "b128 topk128+512 of 8192 h64 s1 v41+v41_fp4"


def test_an_op_without_rows_is_refused() -> None:
    with pytest.raises(ValueError, match="op is 'split_plan'; benchmark rows exist for"):
        load("split_plan")
