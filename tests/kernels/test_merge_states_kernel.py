"""A NaN of a state that has weight shows in its own row of the merge, and in no other."""

from __future__ import annotations

import math

import torch

import cute_mla
from cute_mla.spec.arch import Arch


def test_nan_of_a_state_shows(arch: Arch) -> None:
    draw = torch.Generator().manual_seed(2)
    outs = torch.randn(2, 2, 3, 512, generator=draw).bfloat16()
    lses = torch.randn(2, 2, 3, generator=draw)
    lses[1, 1, 2] = math.nan
    with cute_mla.simulate(arch.name):
        out, lse = cute_mla.merge_states(outs, lses)
    expected = torch.zeros(2, 3, dtype=torch.bool)
    expected[1, 2] = True
    assert torch.equal(out.isnan().all(dim=-1), expected)
    assert torch.equal(out.isnan().any(dim=-1), expected)
    assert torch.equal(lse.isnan(), expected)
