"""The ceilings of a run: what the calls do, and what they are counted as."""

from __future__ import annotations

import pytest
import torch

from cute_mla.profiles.measure import ceilings


def test_ceilings_are_counted_as_what_they_do(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[torch.Tensor] = []
    total = torch.sum

    def recorded(values: torch.Tensor, dim: int, out: torch.Tensor) -> torch.Tensor:
        made.append(values)
        return total(values, dim=dim, out=out)

    monkeypatch.setattr(torch, "sum", recorded)
    found = ceilings.make_ceilings(torch.device("cpu"), l2_bytes=1 << 16, extent=16, copy_bytes=1 << 10)
    assert found.matmul_flops == 2 * 16**3
    assert found.copy_bytes == 2 << 10  # read and written
    product, copied, sums = found.matmul(), found.copy(), found.l2_read()
    assert isinstance(product, torch.Tensor)
    assert product.abs().max() > 0  # zeros run faster
    assert isinstance(copied, torch.Tensor)
    assert copied.nbytes == 1 << 10
    (turns,) = made
    assert turns.untyped_storage().nbytes() == 1 << 15  # half of L2, again and again
    assert found.l2_read_bytes == ceilings.L2_TURNS * (1 << 15) == turns.numel() * 4
    assert isinstance(sums, torch.Tensor)
    assert torch.allclose(sums, turns[0].sum().expand(ceilings.L2_TURNS), atol=1e-3)
