"""The bytes of the model's formulas against those that the simulated device moves: TMA's, and stores to shared memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cute_mla import simulator
from cute_mla.profiles.kernel_stats import dynamic_counts as module
from cute_mla.profiles.kernel_stats.dynamic_counts import FEW, MANY, case_of
from cute_mla.profiles.kernel_stats.golden_counts import read
from cute_mla.profiles.model.tile_costs import block_of
from cute_mla.runtime.artifacts import load_artifacts
from cute_mla.simulator import Observer
from cute_mla.spec.split_plan import TILE_KEYS

HANDED_OVER = 4096  # bytes of a bulk copy to the peer: 32 keys of a box


class Bytes(Observer):
    """Sums over everything that runs: bytes that TMA writes, and that lanes store, to shared memory."""

    def __init__(self) -> None:
        self.tma = 0
        self.stored = 0

    def async_write(self, target: Any, box: Any, warp: int) -> None:
        self.tma += box.nbytes

    def shared_access(self, w: Any, target: Any, index: np.ndarray | None, offsets: np.ndarray, nbytes: int, write: bool) -> None:
        if write:
            self.stored += nbytes * offsets.size


def moved(monkeypatch: pytest.MonkeyPatch, name: str) -> tuple[float, float]:
    """Return the bytes that a kernel moves per 64 keys and CTA: (by TMA, stored by lanes)."""
    entry, run = load_artifacts().manifest.kernels[name], simulator.run
    make = case_of(entry)
    assert make is not None
    sums = []
    for blocks in (FEW, MANY):
        seen = Bytes()
        monkeypatch.setattr(
            simulator,
            "run",
            lambda launch, memory, policy, observer, seen=seen: run(launch, memory, policy, seen if launch.entry == entry.entry else None),
        )
        module._executed(entry, make(blocks * TILE_KEYS), "ptx")
        sums.append(np.array([seen.tma, seen.stored]) / module._row_tiles(entry, make(blocks * TILE_KEYS)))
    by_tma, stored = (sums[1] - sums[0]) / (MANY - FEW)
    return float(by_tma), float(stored)


# beside what the formulas have: rescale factors, 256 bytes, and row statistics
@pytest.mark.parametrize(
    ("name", "config", "tma", "stores"),
    [
        ("dense_decode_sm90_bf16_cluster1", {"operands": "latent", "d_qk": 576, "cluster": 1}, "TMA", ("P",)),
        ("dense_decode_sm90_bf16_fp8_cache_cluster1", {"operands": "fp8_cache", "cluster": 1}, None, ("P", "converted rows")),
        ("sparse_decode_sm90_bf16_fp8_656_cluster1", {"cache": "fp8_656", "cluster": 1}, None, ("P", "stores")),
        ("sparse_decode_sm90_bf16_fp8_656_cluster2", {"cache": "fp8_656", "cluster": 2}, None, ("P", "stores")),
        (
            "dense_decode_sm100_bf16_cluster2",
            {"operands": "latent", "d_qk": 576, "cluster": 2},
            "TMA, a RoPE box of which half is used",
            ("P",),
        ),
    ],
)
def test_bytes_moved(monkeypatch: pytest.MonkeyPatch, name: str, config: dict[str, Any], tma: str | None, stores: tuple[str, ...]) -> None:
    entry = load_artifacts().manifest.kernels[name]
    smem = block_of(entry.op, entry.arch, config).smem
    by_tma, stored = moved(monkeypatch, name)
    assert by_tma == (smem[tma] if tma else 0)
    expected = sum(smem[what] for what in stores) + (smem.get("S swapped", 0) / 2)
    assert expected <= stored <= expected + 1024, (stored, expected)


PAIRS = [name for name in read() if name.startswith(("sparse_decode_sm90", "sparse_prefill_sm90")) and name.endswith("cluster2")]


@pytest.mark.parametrize("name", PAIRS)
def test_bytes_between_the_ctas_of_a_pair(name: str) -> None:
    """Each bulk copy counted is read here, and one as long comes from the peer."""
    entry = load_artifacts().manifest.kernels[name]
    copies = sum(role.of("bulk copy") for role in read()[name].values())
    assert block_of(entry.op, entry.arch, entry.config).smem["copies to and from the peer"] == 2 * copies * HANDED_OVER


def test_every_pair_that_gathers_is_compared() -> None:
    assert len(PAIRS) == 8
