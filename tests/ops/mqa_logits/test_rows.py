"""fp8_mqa_logits: keys in a row. What it computes, what it leaves unwritten, and what can never reach a logit."""

from __future__ import annotations

import math

import pytest
import torch

from cute_mla.indexer import fp8_mqa_logits
from cute_mla.spec.arch import Arch
from cute_mla.testing.compare import cosine_difference
from tests.ops.mqa_logits.logits_call import (
    equal,
    exact,
    expected_rows,
    ints,
    normal,
    row_logits,
    simulated,
)

CALC_DIFF = 5e-6  # DeepGEMM's


@pytest.mark.parametrize("code", ["ptx", "sass"])
def test_agrees_with_the_formula(arch: Arch, code: str) -> None:
    """Normal values with scales of amax / 448, as in DeepGEMM's tests."""
    values, ks, ke = normal(5, 64, 300), ints(0, 0, 7, 130, 299), ints(300, 1, 290, 260, 300)
    found, expected = simulated(arch, lambda: row_logits(values, ks, ke), code=code), expected_rows(values, ks, ke)
    assert torch.equal(found.isfinite(), expected.isfinite())
    finite = expected.isfinite()
    assert cosine_difference(found[finite].double(), expected[finite].double()) <= CALC_DIFF


@pytest.mark.parametrize("sign", [1, -1])
def test_a_plateau_is_zero(arch: Arch, sign: int) -> None:
    """A logit without a positive head is exactly 0, with weights of either sign."""
    values, ks, ke = exact(2, 64, 200), ints(0, 0), ints(200, 200)
    keys = values.keys.float().abs().neg()
    keys[::50] *= -1
    values = values._replace(
        q=values.q.float().abs().to(values.q.dtype), keys=keys.to(values.keys.dtype), weights=sign * (values.weights.abs() + 1)
    )
    found = simulated(arch, lambda: row_logits(values, ks, ke))
    assert equal(found, expected_rows(values, ks, ke))
    assert (found == 0).sum(1).tolist() == [196, 196]


def test_nan_stays_where_it_is(arch: Arch) -> None:
    """NaN in a key or its scale reaches that key's logits, NaN in a token's queries or weights that token's, and no others."""
    values, ks, ke = exact(4, 64, 150), ints(0, 0, 0, 0), ints(150, 150, 150, 150)
    clean = expected_rows(values, ks, ke)
    values.keys.view(torch.uint8)[7, 100] = 0x7F
    values.scales[70] = math.nan
    values.q.view(torch.uint8)[1, 63, 0] = 0xFF
    values.weights[2, 0] = math.nan
    found = simulated(arch, lambda: row_logits(values, ks, ke))
    touched = torch.zeros(4, 150, dtype=torch.bool)
    touched[:, [7, 70]] = True
    touched[1:3] = True
    assert equal(found.masked_fill(touched, 0), clean.masked_fill(touched, 0))
    assert found[:, 70].isnan().all()
    assert found[2].isnan().all()


def test_keys_that_no_token_sees_may_hold_anything(arch: Arch) -> None:
    """NaN keys and scales before, behind and between the windows, within the tiles that are loaded."""
    values, ks, ke = exact(3, 64, 400), ints(20, 300, 22), ints(90, 310, 91)
    expected = expected_rows(values, ks, ke)
    unseen = torch.ones(400, dtype=torch.bool)
    unseen[20:91] = False
    unseen[300:310] = False
    values.keys.view(torch.uint8)[unseen] = 0xFF
    values.scales[unseen] = math.nan
    assert equal(simulated(arch, lambda: row_logits(values, ks, ke)), expected)


def test_a_list_of_keys_and_scales(arch: Arch) -> None:
    """Take kv as a list, as callers that unpack a tuple of tensors pass it."""
    values = exact(1, 8, 5)
    found = simulated(arch, lambda: fp8_mqa_logits(values.q, [values.keys, values.scales], values.weights, ints(0), ints(5)))  # type: ignore[arg-type]
    assert equal(found, expected_rows(values, ints(0), ints(5)))
