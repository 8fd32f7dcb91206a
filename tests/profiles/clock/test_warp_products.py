"""Products of warps on the clock: `mma.sync` on RTX boards, whose time is known by arithmetic."""

from __future__ import annotations

import numpy as np
import pytest

from cute_mla.profiles.clock.cluster_run import TENSOR, cluster_run
from cute_mla.profiles.clock.constants import Constants, constants
from tests.profiles.clock.timed import WARM, executed, timed, words
from tests.simulator.small_kernels import Kernel

PRO, GEFORCE = constants("RTX PRO 6000"), constants("RTX 5090")
CLOCKS = {PRO: 16, GEFORCE: 32}  # of 4,096 FLOP in one of four tensor cores, at 1,024 and 512 FLOP a clock and SM
SIXTEEN_BITS = "m16n8k16.row.col.f32.bf16.bf16.f32"
EIGHT_BITS = "m16n8k32.row.col.f32.e4m3.e4m3.f32"
SCALED = "kind::mxf8f6f4.block_scale.scale_vec::1X.m16n8k32.row.col.f32.e4m3.e4m3.f32.ue8m0"
E4M3_CLOCKS = (PRO, EIGHT_BITS, 16), (GEFORCE, EIGHT_BITS, 32), (PRO, SCALED, 16), (GEFORCE, SCALED, 16)
LATENCY = 29  # that ptxas leaves between a product and the next one on the same sums
PRODUCTS = 16
THREADS = 256  # two warps a scheduler


def products(chains: int, form: str = SIXTEEN_BITS) -> str:
    """Return PRODUCTS products of a form, in turn on so many sums, and stores of them."""
    scales = ", %r0, {0, 0}, %r0, {0, 0}" if form == SCALED else ""
    sums = [[f"%f{40 + 4 * chain + i}" for i in range(4)] for chain in range(chains)]
    text = [f"add.u32 %r{chain + 1}, %r0, {chain}; " for chain in range(chains)]
    text += [f"mov.f32 {name}, 0f00000000; " for chain in sums for name in chain]
    for number in range(PRODUCTS):
        held, chain = ", ".join(sums[number % chains]), number % chains
        operands = f"{{%r0, %r0, %r0, %r0}}, {{%r{chain + 1}, %r0}}"
        text += [f"mma.sync.aligned.{form} {{{held}}}, {operands}, {{{held}}}{scales};\n"]
    results = [name for chain in sums for name in chain]
    text += [f"st.global.f32 [%rd2+{4 * THREADS * place}], {name}; " for place, name in enumerate(results)]
    return "".join(text)


def gaps(chains: int, of: Constants, threads: int = 32) -> list[int]:
    """Return the clocks between the products of the first scheduler."""
    run = timed(Kernel(products(chains), threads=threads), words(16 * THREADS), of=of)
    warps = range(0, threads // 32, 4)
    issued = sorted(clock for warp in warps for clock in run.issues("HMMA", warp))
    assert len(issued) == PRODUCTS * len(warps)
    return np.diff(issued).tolist()


def test_a_chain_takes_the_latency_of_each() -> None:
    assert set(gaps(1, PRO)) == {LATENCY}


def test_where_the_rate_is_lower_a_chain_takes_it() -> None:
    assert set(gaps(1, GEFORCE)) == {CLOCKS[GEFORCE]}


@pytest.mark.parametrize("of", CLOCKS, ids=lambda of: of.gpu)
def test_four_chains_take_the_rate(of: Constants) -> None:
    found = gaps(4, of)
    assert set(found[1:-1]) == {CLOCKS[of]}  # between moves at the ends


@pytest.mark.parametrize(("of", "form", "clocks"), E4M3_CLOCKS)
def test_e4m3_products_take_twice_the_depth_and_scales_the_full_rate(of: Constants, form: str, clocks: int) -> None:
    run = timed(Kernel(products(4, form), threads=32), words(16 * THREADS), of=of)
    found = np.diff(sorted(run.issues("QMMA", 0))).tolist()
    assert set(found[1:-1]) == {clocks}


@pytest.mark.parametrize("of", CLOCKS, ids=lambda of: of.gpu)
def test_warps_of_a_scheduler_share_its_tensor_core(of: Constants) -> None:
    """Fit each of two chains into the latency of the other, as far as the rate lets it."""
    found = gaps(1, of, THREADS)
    assert min(found) == CLOCKS[of]
    assert sum(found) <= (2 * PRODUCTS - 1) * CLOCKS[of] + LATENCY


@pytest.mark.parametrize("of", CLOCKS, ids=lambda of: of.gpu)
def test_the_use_of_the_tensor_cores(of: Constants) -> None:
    clock, _, report = executed(Kernel(products(4), threads=THREADS), words(16 * THREADS), setting=WARM, of=of, edit=str)
    assert not report.findings
    assert cluster_run(clock).busy[TENSOR] == 2 * PRODUCTS * CLOCKS[of]  # of each scheduler
