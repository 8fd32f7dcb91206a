"""Numbers and scales of dense decode over an e4m3 cache, on the simulated device, with 16-bit and with e4m3 queries."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from cute_mla.spec.dense_decode import FP8, FP8_CACHE
from cute_mla.testing.operations.dense_decode.case import DESCALE_K, DESCALE_Q, DenseDecodeCase, make_dense_decode_tensors
from tests.support.bench import Bench, expect, identical

OPERANDS = (FP8_CACHE, FP8)

pytestmark = pytest.mark.parametrize("operands", OPERANDS)


def test_every_number_of_a_cache_is_itself(bench: Bench, operands: str) -> None:
    """All 254, as the values of a single key, without a scale."""
    case = DenseDecodeCase(lengths=(1,), h_q=3, operands=operands, outputs="given", sm_count=1)
    tensors = replace(make_dense_decode_tensors(case), descale_k=None)
    codes = torch.arange(256, dtype=torch.uint8)
    numbers = codes[~codes.view(torch.float8_e4m3fn).float().isnan()].repeat(3)[:576]
    tensors.k_cache.view(torch.uint8)[tensors.block_table[0, 0], 0, 0] = numbers
    out, _ = bench.run(case, tensors)
    values = numbers[:512].view(torch.float8_e4m3fn).to(out.dtype)
    assert torch.equal(out, values.expand(1, 1, 3, 512))


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
