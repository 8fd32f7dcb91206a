"""The arithmetic of norm and rotation in plain torch: rounded as kernels round it, whatever library torch takes a root from."""

from __future__ import annotations

import numpy as np
import torch

from cute_mla.ops.norm_rope import column_sum, inverse_root, rounded


def test_roots_and_quotients_are_rounded_to_nearest() -> None:
    values = 10.0 ** torch.empty(100_000).uniform_(-12, 12)
    values[0], values[1] = 3.697171211242676, 0.0
    with np.errstate(divide="ignore"):
        expected = np.float32(1) / np.sqrt(values.numpy())
    assert np.array_equal(inverse_root(values).numpy(), expected)


def test_sums_add_neighbours() -> None:
    values = torch.tensor([1e8, 1.0, -1e8, 1.0, 3.0, 4.0, 5.0, 6.0])
    assert column_sum(values).item() == ((np.float32(1e8) + np.float32(1)) + (np.float32(-1e8) + np.float32(1))) + 18
    assert column_sum(values.view(4, 2)).tolist() == [1e8, -1e8, 7.0, 11.0]


def test_the_nan_of_gpus() -> None:
    values = torch.tensor([float("nan"), -float("nan"), 1.5, float("inf"), -0.0])
    for dtype in (torch.bfloat16, torch.float16):
        found = rounded(values, dtype)
        assert found.view(torch.int16)[:2].tolist() == [0x7FFF, 0x7FFF]
        assert torch.equal(found[2:], values[2:].to(dtype))
    assert torch.equal(rounded(values[2:], torch.float32), values[2:])
