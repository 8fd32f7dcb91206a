"""Grid of the clock: from clocks of one cluster to the time of a row, by hand-made figures."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cute_mla.manifest import KernelEntry
from cute_mla.profiles.clock.cluster_run import HBM, ISSUE, L2, SHARED, TENSOR, ClusterRun, cause_of
from cute_mla.profiles.clock.constants import FAST, NOMINAL, SLOW, constants, gpus
from cute_mla.profiles.clock.grid import (
    FIXED,
    LATENCY,
    binding_unit,
    clock_ghz,
    hbm_share,
    memory_us,
    row_time,
    stream_setting_share,
    stream_time,
    stream_us,
)
from cute_mla.profiles.clock.kernel_times import LONG, SHORT, KernelTimes, times_between
from cute_mla.profiles.clock.rows import setting_of
from cute_mla.profiles.launches.launch import Combine, Launch
from cute_mla.profiles.launches.of_rows import launch_on
from cute_mla.profiles.launches.partition import CtaWork
from cute_mla.profiles.rows import Case, every_case
from cute_mla.runtime.artifacts import load_artifacts

H200 = constants("H200")
USE = {TENSOR: 0.5, SHARED: 0.4, L2: 0.2, HBM: 0.3, ISSUE: 0.1}
TIMES = KernelTimes(block=1000.0, fixed=5000.0, use=USE, waits={})


def case(name: str) -> Case:
    return next(case for case in every_case() if case.name == name)


def launch(name: str, **changes: object) -> Launch:
    found = launch_on(case(name), "H200")
    assert isinstance(found, Launch)
    return replace(found, **changes)  # type: ignore[arg-type]


def entry(name: str) -> KernelEntry:
    return load_artifacts().manifest.kernels[launch(name).kernel]


def test_a_call_takes_its_rounds() -> None:
    """Launches of one call follow one another; only the first waits for the host."""
    after = Combine(ctas=1, ctas_per_sm=1, bytes=0.0)
    row = launch("X2.4096x128k", cta_work=(CtaWork(10, 1),), ctas=1, bytes=0.0, combine=after, rounds=1)
    one, three = (row_time(replace(row, rounds=rounds), TIMES, 0.0, H200, 2000.0) for rounds in (1, 3))
    assert one.terms["launch"] == H200.launch_us
    assert three.us - H200.launch_us == pytest.approx(3 * (one.us - H200.launch_us) + 2 * H200.dependent_us)
    assert three.us == pytest.approx(sum(three.terms.values()))


def test_the_longest_cta_decides_with_its_seams() -> None:
    work = (CtaWork(10, 1), CtaWork(9, 3), CtaWork(2, 1))
    row = launch("D1.fixed", cta_work=work, ctas=6, bytes=0.0, combine=None)
    time = row_time(row, TIMES, 600.0, H200, None)
    ghz = H200.boost_ghz  # few CTAs: the tensor cores of the GPU are idle
    assert time.ghz == ghz
    assert time.terms["blocks"] == pytest.approx(9_000 / ghz / 1e3)
    assert time.terms["seams"] == pytest.approx(1_200 / ghz / 1e3)
    assert time.terms["fixed part"] == pytest.approx(5_000 / ghz / 1e3)
    assert time.us == pytest.approx(H200.launch_us + 15_200 / ghz / 1e3)
    assert time.terms["combine"] == 0
    cheap = row_time(row, TIMES, 100.0, H200, None)
    assert cheap.terms["blocks"] == pytest.approx(10_000 / ghz / 1e3)
    assert cheap.terms["seams"] == 0


def test_bytes_over_the_rate_of_memory_are_a_lower_bound() -> None:
    row = launch("D1.fixed", cta_work=(CtaWork(10, 1),), ctas=2, bytes=1e9, combine=None)
    time = row_time(row, TIMES, 0.0, H200, None)
    assert memory_us(H200, 1e9) == pytest.approx(1e9 / (H200.hbm_bytes * H200.boost_ghz * 1e9) * 1e6)
    assert time.us == pytest.approx(H200.launch_us + time.terms["fixed part"] + memory_us(H200, 1e9))
    assert time.binds == HBM


def test_what_binds_is_named() -> None:
    row = launch("D1.fixed", cta_work=(CtaWork(100, 1),), ctas=2, bytes=0.0, combine=None)
    assert row_time(row, TIMES, 0.0, H200, None).binds == LATENCY
    busy = replace(TIMES, use=USE | {SHARED: 0.95})
    assert binding_unit(busy) == row_time(row, busy, 0.0, H200, None).binds == SHARED
    short = replace(row, cta_work=(CtaWork(1, 1),))
    assert row_time(short, TIMES, 0.0, H200, None).binds == FIXED


def test_the_clock_falls_with_the_use_of_the_tensor_cores() -> None:
    assert clock_ghz(H200, 0.0) == clock_ghz(H200, H200.boost_use) == H200.boost_ghz
    assert clock_ghz(H200, H200.middle_use) == pytest.approx(H200.middle_ghz)
    assert clock_ghz(H200, H200.loaded_use) == pytest.approx(H200.loaded_ghz)
    assert clock_ghz(H200, 1.0) == H200.loaded_ghz
    assert clock_ghz(H200, 0.68) == pytest.approx((H200.boost_ghz + H200.middle_ghz) / 2)
    ways = [clock_ghz(H200, step / 100) for step in range(101)]
    assert ways == sorted(ways, reverse=True)


def test_the_clock_follows_the_arithmetic_of_the_whole_gpu() -> None:
    """A tile of dense decode has 2,176 clocks of products; that the tensor cores wait for operands does not count."""
    times = replace(TIMES, block=2176 / 0.76, fixed=0.0, use=USE | {TENSOR: 0.99})
    work = (CtaWork(100, 1),) * 66
    full = row_time(launch("D1.fixed", cta_work=work, ctas=132, bytes=0.0, combine=None), times, 0.0, H200, None)
    part = row_time(launch("D1.fixed", cta_work=work[:33], ctas=66, bytes=0.0, combine=None), times, 0.0, H200, None)
    assert full.ghz == pytest.approx(H200.middle_ghz)
    assert part.ghz == H200.boost_ghz
    idle = (CtaWork(100, 1), *(CtaWork(0, 1),) * 65)
    assert row_time(launch("D1.fixed", cta_work=idle, ctas=132, bytes=0.0, combine=None), times, 0.0, H200, None).ghz == H200.boost_ghz


def test_clusters_that_share_keys_share_their_bytes() -> None:
    row = launch("D1.fixed")
    assert (row.row_ctas, row.ctas) == (2, 128)  # 64 parts of two requests
    assert hbm_share(H200, row, 2) == pytest.approx(H200.hbm_bytes / 128)
    assert hbm_share(H200, replace(row, row_ctas=4), 2) == pytest.approx(2 * H200.hbm_bytes / 128)
    assert hbm_share(H200, replace(row, row_ctas=2, ctas=2), 2) == H200.l2_bytes  # no more than an SM takes


def test_rows_of_sparse_prefill_come_from_l2_as_far_as_it_holds_them() -> None:
    small, large = (setting_of(case(name), launch(name), entry(name), H200) for name in ("P1.8k", "P1.128k"))
    assert not small.cold
    assert large.cold
    missing = 1 - 50e6 / (2 * 576 * 131072)
    assert large.hbm_bytes == pytest.approx(H200.hbm_bytes / 132 / missing)
    assert not setting_of(case("M1.8k"), launch("M1.8k"), entry("M1.8k"), H200).cold
    assert setting_of(case("S1.topk2048"), launch("S1.topk2048"), entry("S1.topk2048"), H200).cold
    pages, rows = (setting_of(case(name), launch(name), entry(name), H200) for name in ("X2.64x64k", "X2.4096x128k"))
    assert (pages.cold, rows.cold) == (True, False)


def test_streams_take_waves_or_the_time_of_their_bytes() -> None:
    combine = Combine(ctas=2 * 132 * 2 + 1, ctas_per_sm=2, bytes=0.0)
    clocks = 3 * 1000 + 2 * H200.cta_start_clocks
    assert stream_us(combine, 1000.0, H200) == pytest.approx(clocks / H200.boost_ghz / 1e3)
    cold = replace(combine, cold=True, bytes=1e9)
    assert stream_us(cold, 1000.0, H200) == pytest.approx(memory_us(H200, 1e9) + H200.hbm_latency / H200.boost_ghz / 1e3)
    assert stream_time(cold, 1000.0, H200).binds == HBM
    assert stream_time(replace(combine, ctas=1), 100.0, H200).binds == FIXED
    assert stream_setting_share(combine, H200) == pytest.approx(H200.hbm_bytes / 264)
    assert stream_setting_share(replace(combine, ctas=1), H200) == H200.l2_bytes


def test_combine_counts_after_its_kernel() -> None:
    row = launch("D1.fixed", cta_work=(CtaWork(10, 1),), ctas=2, bytes=0.0)
    assert row.combine is not None
    with_it, without = (row_time(row, TIMES, 0.0, H200, clocks) for clocks in (2000.0, None))
    assert with_it.us - without.us == pytest.approx(H200.dependent_us + stream_us(row.combine, 2000.0, H200))


def test_times_are_the_difference_of_two_runs() -> None:
    entry = load_artifacts().manifest.kernels["dense_decode_sm90_bf16_cluster2"]
    first = {role.name: role.first_warp for role in entry.roles}
    few = ClusterRun(10_000, dict.fromkeys(USE, 600.0), {0: 50, 1: 9, first["score"]: 70}, {(0, "mbarrier"): 300, (1, "barrier"): 5})
    many = ClusterRun(
        10_000 + (LONG - SHORT) * 2_000,
        dict.fromkeys(USE, 600.0 + (LONG - SHORT) * 500),
        {0: 90, 1: 9, first["score"]: 170},
        {(0, "mbarrier"): 300 + (LONG - SHORT) * 800, (1, "barrier"): 5},
    )
    times = times_between(entry, few, many)
    assert times.block == 2_000
    assert times.fixed == 10_000 - SHORT * 2_000
    assert times.use == dict.fromkeys(USE, 0.25)
    assert times.waits["load"] == {"mbarrier": pytest.approx(0.4)}  # of the warp that works alone
    assert times.waits["score"] == {}


def test_causes_have_a_class_each() -> None:
    assert [cause_of(noted) for noted in ("products", "LDG", "STSM", "MUFU", "cluster barrier", "issue")] == [
        "products", "global loads", "shared accesses", "results", "barrier", ISSUE,
    ]  # fmt: skip


@pytest.mark.parametrize("gpu", gpus())
def test_the_clock_of_every_gpu_falls_from_boost_to_loaded(gpu: str) -> None:
    for end in (NOMINAL, FAST, SLOW):
        values = constants(gpu, end)
        assert 0 < values.boost_use < values.middle_use < values.loaded_use < 1
        assert values.boost_ghz >= values.middle_ghz >= values.loaded_ghz > 1
