"""Dense decode over an e4m3 cache on the simulated device: shapes, edges and bits, with 16-bit and with e4m3 queries."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from cute_mla.spec.dense_decode import FP8, FP8_CACHE
from cute_mla.testing.cases.dense_decode import DESCALE_K, DESCALE_Q, UNUSED_TABLE_ENTRY, DenseDecodeCase, make_dense_decode_tensors
from cute_mla.testing.runner import Schedule, schedules
from cute_mla.testing.suites.dense_decode import with_fp8
from tests.support.bench import Bench, expect, identical

OPERANDS = (FP8_CACHE, FP8)
E4M3_NAN = (0x7F, 0xFF)  # both codes
SMALL = DenseDecodeCase(batch=3, lengths=(70, 0, 129), h_q=9, sm_count=4)

pytestmark = pytest.mark.parametrize("operands", OPERANDS)


@pytest.mark.parametrize("h_q", [1, 3, 9, 16, 63, 64, 65, 126, 128])
def test_heads(bench: Bench, operands: str, h_q: int) -> None:
    bench.judge(DenseDecodeCase(s_k=90, h_q=h_q, operands=operands, sm_count=1))


def test_nothing_undefined_decides_a_branch_of_the_machine_code(bench: Bench, operands: str) -> None:
    """A work tile without keys has no sums, and a division is a branch there."""
    bench.judge(DenseDecodeCase(batch=2, lengths=(0, 70), h_q=8, operands=operands, sm_count=2), Schedule("round_robin", 0, "sass"))


@pytest.mark.parametrize(("s_q", "h_q"), [(1, 1), (3, 21), (2, 32), (13, 5), (1, 127), (2, 64), (3, 43), (3, 64), (5, 128)])
def test_rows_around_tiles(bench: Bench, operands: str, s_q: int, h_q: int) -> None:
    """1, 63, 64, 65, 127, 128, 129, 192 and 640 rows."""
    case = DenseDecodeCase(
        "fp16", batch=2, lengths=(130, 3), s_q=s_q, h_q=h_q, causal=True, operands=operands, outputs="strided", sm_count=4
    )
    bench.judge(case)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("page_size", [16, 32, 64, 128, 192])
def test_page_sizes(bench: Bench, operands: str, page_size: int, dtype: str) -> None:
    bench.judge(with_fp8(DenseDecodeCase(dtype, batch=2, lengths=(200, 33), h_q=8, page_size=page_size, sm_count=2), operands))


@pytest.mark.parametrize("length", [1, 2, 16, 17, 63, 64, 65, 127, 128, 129, 640])
def test_lengths_around_tiles_and_pages(bench: Bench, operands: str, length: int) -> None:
    bench.judge(DenseDecodeCase(lengths=(length,), s_q=2, h_q=5, page_size=16, causal=True, operands=operands, sm_count=1))


@pytest.mark.parametrize("sm_count", [1, 3, 132])
def test_numbers_of_splits(bench: Bench, operands: str, sm_count: int) -> None:
    bench.judge(DenseDecodeCase(batch=3, lengths=(1500, 0, 100), h_q=80, operands=operands, sm_count=sm_count))


@pytest.mark.parametrize("layout", ["layers", "padded_rows", "heads_first", "far"])
def test_caches(bench: Bench, operands: str, layout: str) -> None:
    bench.judge(DenseDecodeCase(batch=2, lengths=(70, 150), h_q=6, cache_layout=layout, operands=operands, sm_count=4))  # type: ignore[arg-type]


@pytest.mark.parametrize("layout", ["sliced", "odd", "even", "heads_first"])
@pytest.mark.parametrize("h_q", [5, 128])
def test_layouts_of_q(bench: Bench, operands: str, layout: str, h_q: int) -> None:
    case = DenseDecodeCase(batch=2, s_q=2, lengths=(70, 150), h_q=h_q, causal=True, q_layout=layout, operands=operands, sm_count=4)  # type: ignore[arg-type]
    bench.judge(case)


@pytest.mark.parametrize("outputs", ["given", "strided", "odd"])
def test_outputs(bench: Bench, operands: str, outputs: str) -> None:
    case = DenseDecodeCase("fp16", batch=2, s_q=2, lengths=(70, 150), h_q=9, outputs=outputs, operands=operands, sm_count=1)  # type: ignore[arg-type]
    bench.judge(case)


@pytest.mark.parametrize("values", ["rising", "falling", "peaks"])
@pytest.mark.parametrize("h_q", [16, 128])
def test_scores_of_a_wide_range(bench: Bench, operands: str, values: str, h_q: int) -> None:
    bench.judge(DenseDecodeCase(s_k=600, h_q=h_q, values=values, operands=operands, sm_count=h_q // 64 or 1))  # type: ignore[arg-type]


@pytest.mark.parametrize("scale", [1e-4, 1.0, 30.0])
def test_softmax_scales(bench: Bench, operands: str, scale: float) -> None:
    bench.judge(DenseDecodeCase(s_k=200, h_q=16, softmax_scale=scale, operands=operands, sm_count=2))


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_every_number_of_a_cache_is_itself(bench: Bench, operands: str, dtype: str) -> None:
    """All 254, as the values of a single key, without a scale."""
    case = DenseDecodeCase(dtype, lengths=(1,), h_q=3, operands=operands, outputs="given", sm_count=1)
    tensors = replace(make_dense_decode_tensors(case), descale_k=None)
    codes = torch.arange(256, dtype=torch.uint8)
    numbers = codes[~codes.view(torch.float8_e4m3fn).float().isnan()].repeat(3)[:576]
    tensors.k_cache.view(torch.uint8)[tensors.block_table[0, 0], 0, 0] = numbers
    out, _ = bench.run(case, tensors)
    values = numbers[:512].view(torch.float8_e4m3fn).to(out.dtype)
    assert torch.equal(out, values.expand(1, 1, 3, 512))


def test_a_single_key_is_the_answer(bench: Bench, operands: str) -> None:
    case = DenseDecodeCase(batch=2, lengths=(1, 1), h_q=7, operands=operands, sm_count=1)
    tensors = make_dense_decode_tensors(case)
    out, _ = bench.run(case, tensors)
    keys = tensors.k_cache[tensors.block_table[:, 0].long(), 0, 0, :512].float() * DESCALE_K
    assert torch.equal(out, keys.bfloat16()[:, None, None].expand(2, 1, 7, 512))


def test_scales_are_1_if_absent(bench: Bench, operands: str) -> None:
    case = DenseDecodeCase(batch=2, lengths=(150, 64), h_q=16, softmax_scale=1e-4, operands=operands, sm_count=2)
    tensors = make_dense_decode_tensors(case)
    absent = replace(tensors, descale_q=None, descale_k=None)
    ones = replace(tensors, descale_q=None if tensors.descale_q is None else torch.ones(()), descale_k=torch.ones(1))
    result = bench.run(case, ones)
    assert identical(bench.run(case, absent), result)
    assert not identical(bench.run(case, tensors), result)


def test_scales_scale_scores_and_values(bench: Bench, operands: str) -> None:
    """Doubling descale_k doubles out and scores, which halving softmax_scale takes back: all powers of two, so exactly."""
    case = DenseDecodeCase(lengths=(150,), h_q=16, operands=operands, sm_count=1)
    tensors = make_dense_decode_tensors(case)
    out, lse = bench.run(case, tensors)
    assert tensors.descale_k is not None
    doubled = replace(tensors, descale_k=2 * tensors.descale_k)
    twice, same = bench.run(replace(case, softmax_scale=case.scale / 2), doubled)
    assert torch.equal(twice, 2 * out)
    assert torch.equal(same, lse)
    if operands == FP8:
        assert tensors.descale_q is not None
        halved = replace(doubled, descale_q=tensors.descale_q / 2)
        assert identical(bench.run(case, halved), (twice, lse))


@pytest.mark.parametrize("code", E4M3_NAN)
@pytest.mark.parametrize("page_size", [16, 64, 128])
def test_kv_that_no_request_uses_never_reaches_the_output(bench: Bench, operands: str, code: int, page_size: int) -> None:
    case = replace(SMALL, page_size=page_size, operands=operands)
    tensors = make_dense_decode_tensors(case)
    tensors.k_cache.view(torch.uint8)[tensors.k_cache.isnan()] = code
    expect(case, tensors, bench.run(case, tensors))


@pytest.mark.parametrize("code", E4M3_NAN)
@pytest.mark.parametrize("column", [7, 575])
def test_nan_among_the_keys_in_use_does_reach_the_output(bench: Bench, operands: str, code: int, column: int) -> None:
    case = replace(SMALL, operands=operands)
    tensors = make_dense_decode_tensors(case)
    tensors.k_cache.view(torch.uint8)[tensors.block_table[0, 0], 5, 0, column] = code
    out, _ = bench.run(case, tensors)
    assert out[0].isnan().any()
    assert out[2].isfinite().all()


@pytest.mark.parametrize("entry", [UNUSED_TABLE_ENTRY, -1, -(2**31), 2**31 - 1])
def test_table_entries_past_the_lengths_are_never_read(bench: Bench, operands: str, entry: int) -> None:
    case = replace(SMALL, operands=operands)
    tensors = make_dense_decode_tensors(case)
    expected = bench.run(case, tensors)
    tensors.block_table[tensors.block_table == UNUSED_TABLE_ENTRY] = entry
    assert identical(bench.run(case, tensors), expected)


def test_a_used_table_entry_outside_the_cache_is_a_page_of_zeros(bench: Bench, operands: str) -> None:
    case = replace(SMALL, lengths=(128, 64, 129), operands=operands)
    tensors = make_dense_decode_tensors(case)
    zeros = replace(tensors, k_cache=tensors.k_cache.clone(), block_table=tensors.block_table.clone())
    zeros.k_cache.view(torch.uint8)[tensors.block_table[0, 1]] = 0
    expected = bench.run(case, zeros)
    for entry in (UNUSED_TABLE_ENTRY, -1, -(2**31), 2**31 - 1):
        tensors.block_table[0, 1] = entry
        result, findings = bench.collect(case, tensors)
        assert identical(result, expected), entry
        assert [finding.kind for finding in findings] == ["block_table"]


@pytest.mark.parametrize("empty_lse", [math.inf, -math.inf])
@pytest.mark.parametrize("sm_count", [1, 132])
def test_rows_that_attend_to_nothing(bench: Bench, operands: str, empty_lse: float, sm_count: int) -> None:
    case = DenseDecodeCase(
        batch=3, s_q=3, lengths=(0, 2, 200), h_q=8, causal=True, empty_lse=empty_lse, operands=operands, sm_count=sm_count
    )
    out, lse = bench.run(case)
    assert (out[0] == 0).all()
    assert (out[1, 0] == 0).all()
    assert (lse[0] == empty_lse).all()
    assert (lse[1, :, 0] == empty_lse).all()
    bench.judge(case)


def test_batch_0(bench: Bench, operands: str) -> None:
    out, lse = bench.run(DenseDecodeCase(batch=0, s_q=2, h_q=8, operands=operands))
    assert (out.shape, lse.shape, out.dtype) == ((0, 2, 8, 512), (0, 8, 2), torch.bfloat16)


def test_a_dominating_key_among_many_small_ones(bench: Bench, operands: str) -> None:
    """One key weighs as much as all others together, which are 2^-10 of it each: e4m3 must not lose them."""
    case = DenseDecodeCase(lengths=(1025,), h_q=16, operands=operands, sm_count=1)
    tensors = make_dense_decode_tensors(case)
    tensors.q.view(torch.uint8).zero_() if operands == FP8 else tensors.q.zero_()
    unit = 10 * math.log(2)  # of score
    tensors.q[..., 575] = 1.0
    keys = tensors.k_cache[tensors.block_table[0, :17].long()].view(-1, 576)
    keys[:, 575] = 0.0
    level = unit / (case.scale * DESCALE_K * (DESCALE_Q if operands == FP8 else 1.0))
    softmax_scale = case.scale * level / 256
    keys[3, 575] = 256.0
    tensors.k_cache[tensors.block_table[0, :17].long()] = keys.view(17, 64, 1, 576)
    tensors.k_cache.view(torch.uint8)[tensors.block_table[0, 16], 1:] = 0x7F
    scaled = replace(case, softmax_scale=softmax_scale)
    expect(scaled, tensors, bench.run(scaled, tensors))


@pytest.mark.parametrize("h_q", [40, 128])
def test_every_schedule_gives_the_same_bits(bench: Bench, operands: str, h_q: int) -> None:
    case = DenseDecodeCase(
        batch=3, s_q=2, lengths=(300, 70, 0), h_q=h_q, causal=True, page_size=32, values="peaks", operands=operands, sm_count=6
    )
    bench.judge(case, *schedules(4, 0), Schedule("random", 1), Schedule("adversarial", 1))
