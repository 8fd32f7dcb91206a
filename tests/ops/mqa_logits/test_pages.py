"""fp8_paged_mqa_logits: keys in an index cache, lengths, block tables and metadata."""

from __future__ import annotations

import pytest
import torch

from cute_mla.spec.arch import Arch
from cute_mla.spec.mqa_logits import ROW_BYTES
from cute_mla.testing.compare import cosine_difference
from tests.ops.mqa_logits.logits_call import NAN_BYTE, equal, ints, normal, paged, simulated

CALC_DIFF = 5e-6  # DeepGEMM's


@pytest.mark.parametrize("code", ["ptx", "sass"])
def test_agrees_with_the_formula(arch: Arch, code: str) -> None:
    call = paged([300, 77], 2, 64, spread=normal)
    found, expected = simulated(arch, call.logits, code=code), call.expected()
    assert torch.equal(found.isfinite(), expected.isfinite())
    finite = expected.isfinite()
    assert cosine_difference(found[finite].double(), expected[finite].double()) <= CALC_DIFF


@pytest.mark.parametrize("per_token", [False, True])
def test_lengths_by_rule(arch: Arch, per_token: bool) -> None:
    """Negative: none. More than the table or max_context_len holds: as many as these. About the borders of tiles."""
    lengths = [257, 0, 1, 255, 256, 127, 128, 129, 63, 65]
    call = paged(lengths, 2, 64)
    given = [1 << 30, -5, 1, 255, 256, 127, 128, 129, 63, 65]  # the first has 257 keys, which max_context_len says
    lens = ints(*given)
    if per_token:
        lens = torch.stack([lens.clamp(-9, 1 << 20) - 1, lens], dim=1).contiguous()
    call = call._replace(context_lens=lens)
    found = simulated(arch, call.logits)
    assert equal(found, call.expected())
    assert found.isfinite().sum(1).tolist()[:4] == [257 if per_token else 256, 257, 0, 0]


def test_columns_are_cut_and_filled(arch: Arch) -> None:
    """A max_context_len within, at and beyond what the table holds."""
    call = paged([300, 90], 2, 64)
    for most in (1, 64, 129, 299, 320, 700):
        changed = call._replace(max_context_len=most)
        assert equal(simulated(arch, changed.logits), changed.expected()), most


@pytest.mark.parametrize("per_token", [False, True])
def test_a_length_beyond_the_table_is_what_the_table_holds(arch: Arch, per_token: bool) -> None:
    """With columns for more keys: no entry behind the row's last is read, be it another request's or nobody's."""
    call = paged([320, 90], 2, 64)._replace(max_context_len=700)
    lens = torch.tensor([[1 << 30, 700], [700, 90]], dtype=torch.int32) if per_token else ints(1 << 30, 90)
    call = call._replace(context_lens=lens)
    call.block_table[1, 2:] = call.block_table[1, :1]
    found = simulated(arch, call.logits)
    assert equal(found, call.expected())
    assert found[:2].isfinite().sum(1).tolist() == ([320, 320] if per_token else [319, 320])


def test_unused_bytes_are_nan(arch: Arch) -> None:
    """Page 0, stale slots of used pages with their scales, bytes between pages, and entries of the table that name no page."""
    call = paged([70, 1, 129], 2, 64)
    strided = torch.full((len(call.cache), 64 * ROW_BYTES + 48), NAN_BYTE, dtype=torch.uint8)
    strided[:, : 64 * ROW_BYTES] = call.cache.flatten(1)
    cache = strided.as_strided(call.cache.shape, (strided.stride(0), ROW_BYTES, ROW_BYTES, 1))
    assert 0 not in call.block_table
    assert int(call.block_table.max()) > 1 << 30
    found = simulated(arch, call._replace(cache=cache).logits)
    assert equal(found, call.expected())
    assert not found.isnan().any()
