"""State that launches leave for later ones: homes of CTAs in a bounded pool, and nothing that holds a launch."""

from __future__ import annotations

import gc
import weakref

import numpy as np

from cute_mla.simulator import GlobalMemory, Launch, Module, load_module, run
from cute_mla.simulator.engine import clusters
from cute_mla.simulator.engine.pool import Pool
from tests.simulator.small_kernels import Kernel

KERNEL = Kernel("st.global.u32 [%rd2], %r0;", threads=64)


def launch(module: Module, out: np.ndarray, smem_bytes: int = 1024) -> None:
    memory = GlobalMemory()
    memory.add("out", out.ctypes.data, out.nbytes)
    grid = (4, 1, 1)
    arguments = (out.ctypes.data.to_bytes(8, "little"),)
    report = run(Launch(module, "k", grid, (64, 1, 1), (1, 1, 1), smem_bytes, arguments), memory)
    assert {finding.kind for finding in report.findings} <= {"race"}


def test_a_pool_is_bounded_by_bytes_and_gives_back_what_came_last() -> None:
    pool: Pool[str] = Pool(100)
    for key, name in ((1, "a"), (2, "b"), (2, "c")):
        pool.give((key,), name, 40)
    assert len(pool) == 2
    assert pool.take((1,)) is None
    assert pool.take((2,)) == "c"
    assert pool.nbytes == 40
    pool.give((3,), "one object of any size", 1000)
    assert pool.take((2,)) is None
    assert pool.take((3,)) == "one object of any size"


def test_kernels_share_homes_and_homes_hold_no_launch() -> None:
    pool = clusters.HOMES
    out = np.zeros(64, np.uint32)
    text = KERNEL.text([out])
    first, second = load_module(text), load_module(text.replace("%r<512>", "%r<513>"))
    launch(first, out)
    kept = len(pool)
    launch(second, out)
    assert len(pool) == kept  # registers are counted as they are used
    gone = weakref.ref(first.entries["k"])
    del first
    gc.collect()
    assert gone() is None
    assert pool.nbytes <= pool.max_bytes
