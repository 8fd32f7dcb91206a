"""The analytic model: blocks by hand, what more of something does, and every row on every GPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from cute_mla.profiles.kernel_stats.golden_counts import RoleCounts, read
from cute_mla.profiles.model.launches import NoModelError, Target, launch_of
from cute_mla.profiles.model.machines import BEST, WORST, Machine, machines
from cute_mla.profiles.model.partition import CtaWork
from cute_mla.profiles.model.prediction import Combine, Launch, block_clocks, combine_us, issued, predict, predict_combine
from cute_mla.profiles.model.report import launch_on, predictions
from cute_mla.profiles.model.tile_costs import Block, Stage, block_of
from cute_mla.profiles.rows import OPS, Case, load
from cute_mla.profiles.shapes import DecodeShape
from cute_mla.spec.arch import SM90, SM100

CASES = [case for op in OPS for case in load(op)]


def case_named(name: str) -> Case:
    return next(case for case in CASES if case.name == name)


# MMA and shared memory: the clocks that the kernels' READMEs argue with
CLOCKS = [
    ("dense_decode", SM90.name, {"operands": "latent", "cluster": 2, "d_qk": 576}, 2176, 2240),
    ("dense_decode", SM90.name, {"operands": "latent", "cluster": 2, "d_qk": 512}, 2048, 2048),
    ("dense_decode", SM90.name, {"operands": "latent", "cluster": 2, "d_qk": 320}, 1152, 1152),
    ("dense_decode", SM100.name, {"operands": "latent", "cluster": 2, "d_qk": 512}, 1024, 1152),
    ("dense_decode", SM100.name, {"operands": "latent", "cluster": 2, "d_qk": 320}, 576, 864),
    ("dense_decode", SM90.name, {"operands": "fp8", "cluster": 1}, 1104, 1544),
    ("dense_decode", SM90.name, {"operands": "fp8_cache", "cluster": 1}, 2176, 2880),
    ("dense_decode", SM100.name, {"operands": "latent", "cluster": 2, "d_qk": 576}, 1088, 1248),
    ("dense_decode", SM100.name, {"operands": "fp8", "cluster": 2}, 560, 792),
    ("dense_decode", SM100.name, {"operands": "fp8_cache", "cluster": 2}, 1088, 1216),
    ("sparse_decode", SM90.name, {"cache": "fp8_656", "cluster": 1}, 2176, 2432),
    # of a pair: 2,688 and 2,560 if all four stages went between the CTAs; three do, and each CTA converts the fourth whole
    ("sparse_decode", SM90.name, {"cache": "latent", "cluster": 2}, 2176, 2688),
    ("sparse_decode", SM90.name, {"cache": "fp8_656", "cluster": 2}, 2176, 2624),
    ("sparse_decode", SM90.name, {"cache": "fp8_584", "cluster": 2}, 2048, 2496),
    ("sparse_decode", SM100.name, {"cache": "latent", "cluster": 2}, 1088, 1216),
    ("sparse_decode", SM100.name, {"cache": "fp8_584", "cluster": 2}, 1024, 1152),
    ("sparse_prefill", SM90.name, {"d_qk": 576, "cluster": 1}, 2176, 2240),
    # of a pair: 2,496 and 2,304 if all four stages went between the CTAs; two do
    ("sparse_prefill", SM90.name, {"d_qk": 576, "cluster": 2}, 2176, 2368),
    ("sparse_prefill", SM90.name, {"d_qk": 512, "cluster": 2}, 2048, 2176),
    ("sparse_prefill", SM100.name, {"d_qk": 576, "cluster": 2}, 1088, 1216),
    ("dense_prefill", SM90.name, {"d_qk": 192}, 2560, 2304),
    ("dense_prefill", SM90.name, {"d_qk": 128}, 2048, 1792),
    ("dense_prefill", SM90.name, {"d_qk": 256}, 2560, 2432),
    ("dense_prefill", SM100.name, {"d_qk": 192}, 2560, 2688),
    ("dense_prefill", SM100.name, {"d_qk": 256, "cluster": 2}, 2048, 1536),
    ("dense_prefill_dq", SM90.name, {"d_qk": 192}, 3072, 2656),
    ("dense_prefill_dq", SM90.name, {"d_qk": 128}, 3072, 2560),
    ("dense_prefill_dkdv", SM90.name, {"d_qk": 192}, 2560, 2272),
    ("dense_prefill_dkdv", SM90.name, {"d_qk": 128}, 2048, 1824),
    ("dense_prefill_dq", SM90.name, {"d_qk": 256}, 3072, 3072),
    ("dense_prefill_dkdv", SM90.name, {"d_qk": 256}, 2048, 2192),
    ("dense_prefill_dq", SM100.name, {"d_qk": 192}, 2048, 2304),
    ("dense_prefill_dq", SM100.name, {"d_qk": 128}, 1536, 1792),
    ("dense_prefill_dkdv", SM100.name, {"d_qk": 192}, 1920, 2272),
    ("dense_prefill_dkdv", SM100.name, {"d_qk": 128}, 2048, 2304),
    ("dense_prefill_dq", SM100.name, {"d_qk": 256}, 1536, 2304),
    ("dense_prefill_dkdv", SM100.name, {"d_qk": 256}, 2560, 4096),
]


@pytest.mark.parametrize(("op", "arch", "config", "mma", "port"), CLOCKS)
def test_clocks_of_a_block(op: str, arch: str, config: Mapping[str, Any], mma: int, port: int) -> None:
    machine = next(bounds.best for bounds in machines().values() if bounds.best.arch == arch)
    clocks = block_clocks(block_of(op, arch, config), {}, machine, BEST, 1, 1)
    assert (clocks["MMA"], clocks["shared memory"]) == (mma, port)


def test_dense_decode_by_hand() -> None:
    """D1.fixed on an H200: 64 parts of two whole requests, each a pair of CTAs that share the 73,728 bytes of a block."""
    clocks = predictions(launch_on(case_named("D1.fixed"), "H200"), "H200")[0].clocks
    assert clocks["L2"] == pytest.approx(36864 / (7.0e3 / 1.755 / 128))
    assert clocks["HBM"] == pytest.approx(36864 / (4.3e3 / 1.755 / 128))
    assert clocks["path"] == 1152 + 486 + 2 * 30


# L2: bytes of a block and SM, by the READMEs; of fp8_656, 656 bytes are 21 sectors of 32. Of a key that the peer brings, a CTA of a pair
# gathers the columns that are no values, the stages that are not exchanged, and in sparse decode the scales
L2_BYTES = [
    ("dense_decode", SM90.name, {"operands": "latent", "cluster": 2, "d_qk": 576}, 36864),
    ("dense_decode", SM90.name, {"operands": "fp8", "cluster": 1}, 36864),
    ("dense_decode", SM100.name, {"operands": "latent", "cluster": 2, "d_qk": 576}, 40960),
    ("sparse_decode", SM90.name, {"cache": "latent", "cluster": 1}, 73728),
    ("sparse_decode", SM90.name, {"cache": "latent", "cluster": 2}, 40960),
    ("sparse_decode", SM90.name, {"cache": "fp8_656", "cluster": 1}, 64 * 672),
    ("sparse_decode", SM90.name, {"cache": "fp8_656", "cluster": 2}, 32 * (672 + 288)),  # 128 + 16 + 128 are 9 sectors
    ("sparse_decode", SM90.name, {"cache": "fp8_584", "cluster": 2}, 32 * (608 + 224)),  # 64 + 128 + 8 are 7
    ("sparse_decode", SM90.name, {"cache": "v41", "cluster": 2}, 32 * (544 + 160)),
    ("sparse_prefill", SM90.name, {"d_qk": 576, "cluster": 2}, 57344),
    ("sparse_prefill", SM90.name, {"d_qk": 512, "cluster": 2}, 49152),
    ("sparse_prefill", SM100.name, {"d_qk": 576, "cluster": 2}, 36864),
    ("dense_prefill", SM90.name, {"d_qk": 192}, 81920),
    ("dense_prefill", SM90.name, {"d_qk": 256}, 81920),
    ("dense_prefill", SM100.name, {"d_qk": 256, "cluster": 2}, 65536),
    ("dense_prefill_dq", SM100.name, {"d_qk": 192}, 81920),
    ("dense_prefill_dkdv", SM100.name, {"d_qk": 192}, 61440),
    ("dense_prefill_dkdv", SM100.name, {"d_qk": 256}, 131072),
]


@pytest.mark.parametrize(("op", "arch", "config", "l2_bytes"), L2_BYTES)
def test_bytes_from_l2(op: str, arch: str, config: Mapping[str, Any], l2_bytes: int) -> None:
    assert block_of(op, arch, config).l2_bytes == l2_bytes


@pytest.mark.parametrize(("arch", "path", "words"), [(SM90.name, 208, 2 * 128 * 16), (SM100.name, 320, 2 * 256 * 16)])
def test_what_a_mask_adds_to_a_block(arch: str, path: int, words: int) -> None:
    """Selects behind which the softmax waits, and 16 bytes of mask for each row, read twice."""
    plain, masked = (block_of(op, arch, {"d_qk": 192}) for op in ("dense_prefill", "masked_prefill"))
    assert sum(stage.best for stage in masked.path) - sum(stage.best for stage in plain.path) == path
    assert masked.l2_bytes - plain.l2_bytes == words
    assert (masked.flops, masked.smem, masked.units) == (plain.flops, plain.smem, plain.units)


def test_exponentials_of_dense_prefill() -> None:
    """128 x 128 scores, and one factor a row and lane of its quad: the README's 1,056 clocks. On Blackwell 6 of 8 of twice as many."""
    assert predictions(launch_on(case_named("M1.8k"), "H200"), "H200")[0].clocks["MUFU"] == pytest.approx(1056, rel=0.01)
    assert predictions(launch_on(case_named("M1.8k"), "B200"), "B200")[0].clocks["MUFU"] == pytest.approx(1552, rel=0.01)


@pytest.mark.parametrize(("name", "row_tiles", "key_tiles"), [("M2.8k_full", 56 * 64, 56 * 86), ("M2.8k", 1807, 2439)])
def test_the_longest_ctas_of_the_backward_pass(name: str, row_tiles: int, key_tiles: int) -> None:
    """8,192 items on 148 SMs, each over 64 tiles of 128 keys, then over 86 tiles of 96 rows; on average 1,799 and 2,417 if causal."""
    launch = launch_on(case_named(name), "B200")
    assert isinstance(launch, Launch)
    assert launch.after is not None
    assert [max(work.blocks for work in each.cta_work) for each in (launch, launch.after)] == [row_tiles, key_tiles]


def test_combine_of_a_small_call_takes_a_row_apart() -> None:
    combine = launch_on(case_named("C1.many"), "H200")
    assert isinstance(combine, Combine)
    assert (combine.ctas, combine.busiest_bytes) == (16 * 8, 64 * 2052 / 8)
    behind = launch_on(case_named("D12.h16"), "H200")
    assert isinstance(behind, Launch)
    assert behind.combine is not None
    assert behind.combine.ctas == 16 * 8


def test_combine_passes_over_what_is_not_cut() -> None:
    """D1: 128 requests, none cut, on 33 CTAs along them. C1.two: all of 128 cut in two."""
    behind = launch_on(case_named("D1.fixed"), "H200")
    assert isinstance(behind, Launch)
    assert behind.combine == Combine(33 * 16, 2, 0.0, 0.0, loads=1 + 2, heads=8)
    alone = launch_on(case_named("C1.two"), "H200")
    assert isinstance(alone, Combine)
    assert (alone.ctas, alone.busiest_bytes, alone.loads) == (33 * 16, 4 * 8 * 2 * 2052, 1 + 2 * 4)


SIMPLE = Block(
    keys=64, rows=64, units=1, flops={"S": 4096.0 * 100}, smem={"all": 128.0 * 90}, l2_bytes=640.0, hbm_bytes=0.0,
    path=(Stage("a", 10, 20), Stage("b", 30, 40, barriers=0)), fill=(Stage("a", 1000, 1000, barriers=0),), loads=2,
)  # fmt: skip
COUNTS = {"lone": RoleCounts(1, 4, {"mov": 8.0, "ex2": 4.0}, 70.0), "all": RoleCounts(4, 4, {"packed f32": 8.0, "cvt": 8.0}, 400.0)}


def machine(**changes: Any) -> Machine:
    return replace(
        machines()["H800"].best, l2_latency_clocks=100.0, hbm_latency_clocks=600.0, handover_clocks=0.0, chain_clocks=2.0, **changes
    )


def simple(**changes: Any) -> Launch:
    made = Launch("op", "arch", {}, "k", SIMPLE, COUNTS, (CtaWork(10, 1), CtaWork(8, 3)), row_ctas=1, ctas=132, bytes=0.0)
    return replace(made, **changes)


def test_every_resource_by_hand() -> None:
    clocks = block_clocks(SIMPLE, COUNTS, machine(), BEST, 1, 1)
    assert clocks["MMA"] == 100
    assert clocks["shared memory"] == 90
    assert clocks["L2"] == 10  # one CTA: 64 bytes a clock
    assert clocks["MUFU"] == 4 * 32 / 16
    assert clocks["FP32"] == 8 * 64 / 128
    assert clocks["conversion"] == 8 * 32 / 64
    assert clocks["issue"] == 16 / 4 + 4 / 4
    assert clocks["path"] == 10 + 30
    assert block_clocks(SIMPLE, COUNTS, machine(), WORST, 1, 1)["path"] == 20 + 40


def test_a_lone_warp_has_one_scheduler() -> None:
    assert issued(COUNTS, ()) == [5, 5, 5, 5]
    assert issued(COUNTS, ("lone",)) == [4, 8, 4, 4]


def test_a_launch_by_hand() -> None:
    """H800: 1.6 GHz. The longest part has 10 blocks of 100 clocks; first loads 2 x 100 + 600, epilogue 2 x 400 / 4."""
    found = predict(simple(), machine(launch_us=1.0), BEST)
    assert found.clocks["MMA"] == 100
    clocks = {"first loads": 800, "first scores": 1000, "blocks": 1000, "epilogue": 200}
    assert {name: found.terms[name] for name in clocks} == pytest.approx({name: number / 1600 for name, number in clocks.items()})
    assert found.us == pytest.approx(1.0 + 3000 / 1600)
    assert found.binds == "fixed"
    # at worst a piece's first scores and epilogue stand between it and the next: 1,200 clocks twice, so the second part is the longest
    worst = predict(simple(), machine(launch_us=1.0, piece_overlap=0.0), BEST)
    assert (worst.terms["blocks"], worst.terms["seams"]) == pytest.approx((800 / 1600, 2400 / 1600))


def test_memory_binds_beyond_the_blocks() -> None:
    found = predict(simple(bytes=3.0e6 * 50), machine(), BEST)
    assert found.terms["memory beyond them"] == pytest.approx(50 - 1000 / 1600)
    assert found.binds == "HBM"


def test_fixed_parts_are_counted_per_64_rows() -> None:
    twice = predict(simple(block=replace(SIMPLE, rows=128)), machine(), BEST)
    assert twice.terms["epilogue"] == pytest.approx(2 * 200 / 1600)


def test_partial_results_that_leave_l2_cost_memory() -> None:
    combine = Combine(ctas=8, ctas_per_sm=2, bytes=3.0e6 * 40, busiest_bytes=0.0)
    kept, spilled = (predict(simple(bytes=3.0e6 * 50, combine=combine), machine(results_in_l2=share), BEST) for share in (1.0, 0.0))
    assert spilled.terms["memory beyond them"] - kept.terms["memory beyond them"] == pytest.approx(40)
    assert spilled.terms["combine"] == pytest.approx(600 / 1600 + 40)


def test_combine_by_hand() -> None:
    # 1,000 CTAs, two on an SM: 4 waves, of which three start and load once; then three loads and 6,400 bytes for each of two
    combine = Combine(ctas=1000, ctas_per_sm=2, bytes=0.0, busiest_bytes=6400.0)
    clocks = 3 * (200 + 100) + 3 * 100 + 2 * 6400 / 64
    assert combine_us(combine, machine(cta_start_clocks=200.0)) == pytest.approx(clocks / 1600)
    few = replace(combine, ctas=8, busiest_bytes=64000.0)  # each has an SM for itself
    assert combine_us(few, machine()) == pytest.approx((3 * 100 + 64000 / 64) / 1600)
    alone = predict_combine(replace(combine, bytes=3.0e6 * 20, cold=True), machine(launch_us=1.0))
    assert alone.us == pytest.approx(1.0 + 600 / 1600 + 20)


# ---------------------------------------------------------------- what more of something does


@pytest.mark.parametrize("name", ["D1.fixed", "D5.fixed", "D13.mixed", "S1.topk2048", "P1.8k", "M1.2k"])
def test_more_sms_are_never_slower(name: str) -> None:
    case, bounds = case_named(name), machines()["H200"]
    times = []
    for sm_count in (16, 32, 66, 132, 264):
        launch = launch_of(case, Target(SM90, sm_count, read()))
        assert isinstance(launch, Launch)
        faster: dict[str, Any] = {"l2_tbytes": 1e9, "sm_count": sm_count}  # rates of the whole GPU as they are would be shared by more
        times.append(predict(replace(launch, combine=None), replace(bounds.best, **faster), BEST).us)
    assert all(after <= before * 1.001 for before, after in pairwise(times)), times


ROWS = [(case, gpu) for case in CASES for gpu in machines()]


@pytest.mark.parametrize(("case", "gpu"), ROWS, ids=str)
def test_every_row_has_a_model(case: Case, gpu: str) -> None:
    """On the worst machine every row is slower."""
    best, worst = predictions(launch_on(case, gpu), gpu)
    assert best.binds in {*best.clocks, "HBM", "fixed"}
    assert sum(best.terms.values()) == pytest.approx(best.us)
    assert 0 < best.us < worst.us < 4 * best.us


def test_a_kernel_without_counts_is_named() -> None:
    case = case_named("D1.fixed")
    with pytest.raises(NoModelError, match="the instructions of dense_decode_sm90_bf16_cluster2 are not recorded"):
        launch_of(case, Target(SM90, 132, {}))
    with pytest.raises(NoModelError, match="fp16"):
        launch_of(replace(case, dtype="fp16"), Target(SM90, 132, read()))


def test_longer_requests_take_longer() -> None:
    case = case_named("D1.fixed")
    times = []
    for length in (64, 640, 4096, 40960):
        longer = replace(case, shape=DecodeShape((length,) * 128, 1, 128))
        launch = launch_of(longer, Target(SM90, 132, read()))
        times.append(predict(launch, machines()["H200"].best, BEST).us)  # type: ignore[arg-type]
    assert times == sorted(times)


# ---------------------------------------------------------------- planted errors


def doubled(launch: Launch, role: str) -> Launch:
    of_role = launch.counts[role]
    more = replace(of_role, slope={name: 2 * number for name, number in of_role.slope.items()}, fixed=2 * of_role.fixed)
    return replace(launch, counts={**launch.counts, role: more})


def test_a_role_that_executes_twice_as_much_shows() -> None:
    launch = launch_on(case_named("D1.fixed"), "H200")
    assert isinstance(launch, Launch)
    best = machines()["H200"].best
    before, after = (predict(made, best, BEST) for made in (launch, doubled(launch, "score")))
    score = launch.counts["score"]
    assert after.clocks["issue"] - before.clocks["issue"] == pytest.approx((score.total - score.of("mov")) / 4)
    assert after.clocks["MUFU"] == pytest.approx(2 * before.clocks["MUFU"])
    longest = max(launch.counts, key=lambda role: launch.counts[role].fixed)
    slower = predict(doubled(launch, longest), best, BEST)
    assert slower.terms["epilogue"] > 1.9 * before.terms["epilogue"]
    assert slower.us > before.us


def test_bytes_that_are_forgotten_show() -> None:
    launch = launch_on(case_named("S1.topk2048"), "H200")
    assert isinstance(launch, Launch)
    best = machines()["H200"].best
    without = {name: number for name, number in launch.block.smem.items() if "peer" not in name}
    lighter = predict(replace(launch, block=replace(launch.block, smem=without)), best, BEST)
    before = predict(launch, best, BEST)
    assert before.clocks["shared memory"] - lighter.clocks["shared memory"] == 384  # three of four stages, in and out
    assert lighter.us < before.us
