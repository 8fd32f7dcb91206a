"""Every line of the edge contract that dense decode has, on the simulated device.

What the API refuses, and that it neither allocates nor copies, is tested without kernels in test_api.py and test_errors.py; that equal
inputs give equal bits, in test_bits.py.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from cute_mla.testing.cases.dense_decode import UNUSED_TABLE_ENTRY, DenseDecodeCase, make_dense_decode_tensors
from cute_mla.testing.cases.far import FAR_ELEMENTS
from cute_mla.testing.cases.tensors import OutputBuffer
from tests.support.bench import Bench, expect, identical

SMALL = DenseDecodeCase(batch=3, lengths=(70, 0, 129), h_q=9, sm_count=4)


def test_lse_is_the_natural_logarithm_in_fp32(bench: Bench) -> None:
    case = DenseDecodeCase(lengths=(64,), h_q=4, sm_count=1)
    tensors = make_dense_decode_tensors(case)
    tensors.q.zero_()  # every score is 0, so that lse = ln 64
    _, lse = bench.run(case, tensors)
    assert lse.dtype == torch.float32
    torch.testing.assert_close(lse, torch.full((1, 4, 1), math.log(64)), rtol=1e-6, atol=0)


@pytest.mark.parametrize("empty_lse", [math.inf, -math.inf])
@pytest.mark.parametrize("sm_count", [1, 132])
def test_a_row_that_attends_to_nothing_has_out_0_and_the_lse_asked_for(bench: Bench, empty_lse: float, sm_count: int) -> None:
    case = DenseDecodeCase(batch=3, s_q=3, lengths=(0, 2, 200), h_q=8, causal=True, empty_lse=empty_lse, sm_count=sm_count)
    out, lse = bench.run(case)
    assert (out[0] == 0).all()
    assert (lse[0] == empty_lse).all()
    assert (out[1, 0] == 0).all()
    assert (lse[1, :, 0] == empty_lse).all()
    assert lse[1, :, 1:].isfinite().all()
    assert lse[2].isfinite().all()
    bench.judge(case)


def test_lse_of_an_empty_row_is_plus_infinity_unless_asked_otherwise(bench: Bench) -> None:
    _, lse = bench.run(SMALL)
    assert (lse[1] == math.inf).all()


@pytest.mark.parametrize("entry", [UNUSED_TABLE_ENTRY, -1, -(2**31), 2**31 - 1])
def test_table_entries_past_the_lengths_are_never_read(bench: Bench, entry: int) -> None:
    tensors = make_dense_decode_tensors(SMALL)
    expected = bench.run(SMALL, tensors)
    tensors.block_table[tensors.block_table == UNUSED_TABLE_ENTRY] = entry
    assert identical(bench.run(SMALL, tensors), expected)


@pytest.mark.parametrize("page_size", [16, 64])
def test_a_used_table_entry_outside_the_cache_is_a_page_of_zeros(bench: Bench, page_size: int) -> None:
    """The page after the last one, a negative one, and both ends of int32. The pages around it are walked by the same CTA."""
    case = replace(SMALL, lengths=(200, 0, 129), page_size=page_size, sm_count=2)
    tensors = make_dense_decode_tensors(case)
    zeros = replace(tensors, k_cache=tensors.k_cache.clone(), block_table=tensors.block_table.clone())
    zeros.k_cache[tensors.block_table[0, 1]] = 0
    expected = bench.run(case, zeros)
    for page in (len(tensors.k_cache), -1, -(2**31), 2**31 - 1):
        tensors.block_table[0, 1] = page
        result, (finding,) = bench.collect(case, tensors)
        assert identical(result, expected), page
        assert finding.kind == "block_table"
        assert finding.message.startswith(f"block_table[0, 1] is {page} and request 0 uses it; supported: 0 to {len(tensors.k_cache) - 1};")
    expect(case, tensors, expected)


def test_a_table_without_a_column_to_spare(bench: Bench) -> None:
    tensors = make_dense_decode_tensors(SMALL)
    narrow = replace(tensors, block_table=tensors.block_table[:, :3].contiguous())
    expect(SMALL, narrow, bench.run(SMALL, narrow))


def test_a_table_that_is_a_slice_of_a_wider_one(bench: Bench) -> None:
    tensors = make_dense_decode_tensors(SMALL)
    wide = torch.full((3, 11), UNUSED_TABLE_ENTRY, dtype=torch.int32)
    wide[:, 4:9] = tensors.block_table
    sliced = replace(tensors, block_table=wide[:, 4:9])
    assert identical(bench.run(SMALL, sliced), bench.run(SMALL, tensors))


@pytest.mark.parametrize("rubbish", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("page_size", [16, 64, 128])
def test_kv_that_no_request_uses_never_reaches_the_output(bench: Bench, rubbish: float, page_size: int) -> None:
    case = replace(SMALL, page_size=page_size)
    tensors = make_dense_decode_tensors(case)
    tensors.k_cache[tensors.k_cache.isnan()] = rubbish
    expect(case, tensors, bench.run(case, tensors))


def test_nan_among_the_keys_in_use_does_reach_the_output(bench: Bench) -> None:
    tensors = make_dense_decode_tensors(SMALL)
    tensors.k_cache[tensors.block_table[0, 0], 5, 0, 7] = math.nan
    out, _ = bench.run(SMALL, tensors)
    assert out[0].isnan().any()
    assert out[2].isfinite().all()


@pytest.mark.parametrize("sm_count", [1, 132])
def test_length_0(bench: Bench, sm_count: int) -> None:
    bench.judge(DenseDecodeCase(batch=4, lengths=(0, 0, 100, 0), h_q=8, sm_count=sm_count))


def test_nothing_but_requests_of_length_0(bench: Bench) -> None:
    out, lse = bench.run(DenseDecodeCase(batch=3, lengths=(0, 0, 0), h_q=80))
    assert (out == 0).all()
    assert (lse == math.inf).all()


def test_batch_0(bench: Bench) -> None:
    for metadata in ("tensors", "object"):
        out, lse = bench.run(DenseDecodeCase(batch=0, s_q=2, h_q=8, metadata=metadata))  # type: ignore[arg-type]
        assert out.shape == (0, 2, 8, 512)
        assert lse.shape == (0, 8, 2)


def test_causal_is_aligned_bottom_right(bench: Bench) -> None:
    case = DenseDecodeCase(lengths=(66,), s_q=4, h_q=2, causal=True, sm_count=1)
    tensors = make_dense_decode_tensors(case)
    tensors.q.zero_()  # token i attends equally to the 63 + i keys that it sees
    _, lse = bench.run(case, tensors)
    visible = torch.tensor([63.0, 64.0, 65.0, 66.0])
    torch.testing.assert_close(lse, visible.log().expand(1, 2, 4), rtol=1e-6, atol=0)


def test_causal_means_nothing_for_one_token(bench: Bench) -> None:
    tensors = make_dense_decode_tensors(SMALL)
    assert identical(bench.run(replace(SMALL, causal=True), tensors), bench.run(SMALL, tensors))


def test_offsets_beyond_2_31_elements(bench: Bench) -> None:
    case = DenseDecodeCase(batch=2, lengths=(100, 70), h_q=8, cache_layout="far", sm_count=2)
    tensors = make_dense_decode_tensors(case)
    assert int(tensors.block_table[0, 0]) * tensors.k_cache.stride(0) >= FAR_ELEMENTS
    expect(case, tensors, bench.run(case, tensors))


def test_q_and_out_beyond_2_31_elements(bench: Bench) -> None:
    case = DenseDecodeCase(batch=2, lengths=(70, 50), h_q=4, sm_count=2)
    tensors = make_dense_decode_tensors(case)
    stride = FAR_ELEMENTS + 64
    q = torch.empty(stride + 4 * 576, dtype=torch.bfloat16).as_strided((2, 1, 4, 576), (stride, 2304, 576, 1))
    out = torch.empty(stride + 4 * 512, dtype=torch.bfloat16).as_strided((2, 1, 4, 512), (stride, 2048, 512, 1))
    lse = torch.empty(2, 4, 1)
    q.copy_(tensors.q)
    far = replace(tensors, q=q, output_buffers={"out": OutputBuffer(out, out), "lse": OutputBuffer(lse, lse)})
    assert identical(bench.run(case, far), bench.run(case, tensors))


@pytest.mark.parametrize("layout", ["layers", "padded_rows", "heads_first"])
@pytest.mark.parametrize("page_size", [16, 64])
def test_block_strided_caches(bench: Bench, layout: str, page_size: int) -> None:
    case = DenseDecodeCase(batch=2, lengths=(70, 150), h_q=6, h_kv=2, page_size=page_size, cache_layout=layout, sm_count=4)  # type: ignore[arg-type]
    bench.judge(case)


@pytest.mark.parametrize("layout", ["sliced", "heads_first"])
@pytest.mark.parametrize("h_q", [5, 128])
def test_sliced_q(bench: Bench, layout: str, h_q: int) -> None:
    bench.judge(DenseDecodeCase(batch=2, s_q=2, lengths=(70, 150), h_q=h_q, causal=True, q_layout=layout, sm_count=4))  # type: ignore[arg-type]


@pytest.mark.parametrize("h_q", [5, 128])
def test_q_whose_strides_tma_cannot_express(bench: Bench, h_q: int) -> None:
    bench.judge(DenseDecodeCase(batch=2, s_q=2, lengths=(70, 150), h_q=h_q, causal=True, q_layout="odd", sm_count=4))


def test_q_that_is_one_row_for_all_heads(bench: Bench) -> None:
    case = DenseDecodeCase(batch=2, lengths=(70, 150), h_q=8, sm_count=2)
    tensors = make_dense_decode_tensors(case)
    shared = replace(tensors, q=tensors.q[:, :, :1].expand(-1, -1, 8, -1))
    expect(case, shared, bench.run(case, shared))


@pytest.mark.parametrize("outputs", ["given", "strided", "odd"])
@pytest.mark.parametrize("sm_count", [1, 132])
def test_outputs_given_with_strides(bench: Bench, outputs: str, sm_count: int) -> None:
    bench.judge(DenseDecodeCase("fp16", batch=2, s_q=2, lengths=(70, 150), h_q=9, outputs=outputs, sm_count=sm_count))  # type: ignore[arg-type]
