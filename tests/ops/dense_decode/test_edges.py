"""Edges of dense decode that no case of the suites draws, on the simulated device.

The API's refusals are tested without kernels in test_errors.py; its allocations in test_api.py.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from cute_mla.spec.dense_decode import OPERANDS
from cute_mla.testing.operations.dense_decode.case import DenseDecodeCase, make_dense_decode_tensors
from tests.support.bench import Bench, expect, identical

SMALL = DenseDecodeCase(batch=3, lengths=(70, 0, 129), h_q=9, sm_count=4)


@pytest.mark.in_turn
@pytest.mark.parametrize(("operands", "page_size"), [("latent", 16), ("latent", 64), ("fp8_cache", 64), ("fp8", 64)])
def test_a_used_table_entry_outside_the_cache_is_a_page_of_zeros(bench: Bench, operands: str, page_size: int) -> None:
    """The page after the last one, a negative one, and both ends of int32. The pages around it are walked by the same CTA."""
    case = replace(SMALL, lengths=(200, 0, 129), page_size=page_size, operands=operands, sm_count=2)
    tensors = make_dense_decode_tensors(case)
    zeros = replace(tensors, k_cache=tensors.k_cache.clone(), block_table=tensors.block_table.clone())
    zeros.k_cache.view(torch.uint8)[tensors.block_table[0, 1]] = 0
    expected = bench.run(case, zeros)
    for page in (len(tensors.k_cache), -1, -(2**31), 2**31 - 1):
        tensors.block_table[0, 1] = page
        result, (finding,) = bench.collect(case, tensors)
        assert identical(result, expected), page
        assert finding.kind == "block_table"
        assert finding.message.startswith(f"block_table[0, 1] is {page} and request 0 uses it; supported: 0 to {len(tensors.k_cache) - 1};")
    expect(case, tensors, expected)


@pytest.mark.parametrize("operands", OPERANDS)
@pytest.mark.parametrize("column", [7, 575])
def test_nan_among_the_keys_in_use_does_reach_the_output(bench: Bench, operands: str, column: int) -> None:
    case = replace(SMALL, operands=operands)
    tensors = make_dense_decode_tensors(case)
    tensors.k_cache[tensors.block_table[0, 0], 5, 0, column] = math.nan
    out, _ = bench.run(case, tensors)
    assert out[0].isnan().any()
    assert out[2].isfinite().all()
