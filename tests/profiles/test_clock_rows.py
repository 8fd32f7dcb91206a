"""Rows by the clock, from machine code to microseconds, and the golden clocks of the kernels."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path

import pytest

from cute_mla.manifest import KernelEntry
from cute_mla.profiles.clock import golden_clocks
from cute_mla.profiles.clock import rows as module
from cute_mla.profiles.clock.cluster_run import HBM, cluster_run
from cute_mla.profiles.clock.constants import FAST, NOMINAL, SLOW, constants
from cute_mla.profiles.clock.engine import Setting
from cute_mla.profiles.clock.golden_clocks import FILE, LIMIT, clocks, differences, read
from cute_mla.profiles.clock.grid import RowTime
from cute_mla.profiles.clock.kernel_times import clock_kernel
from cute_mla.profiles.clock.rows import clock_of, row_clocks, time_of
from cute_mla.profiles.launches.launch import NoLaunchError
from cute_mla.profiles.report import clock_document
from cute_mla.profiles.rows import Case, every_case
from cute_mla.runtime.artifacts import load_artifacts
from cute_mla.spec.mla import D_QK, ELEMENT_BYTES

AGAIN = "python -m cute_mla.profiles.clock.golden_clocks"
# a kernel of each structure: roles with TMA, a gather that converts, one that copies, two groups of scores, and tensor memory
STRUCTURES = (
    "dense_decode_sm100_bf16_cluster2",
    "dense_decode_sm90_bf16_cluster2",
    "sparse_decode_sm90_bf16_fp8_656_cluster2",
    "sparse_prefill_sm90_bf16_d576_cluster1",
    "dense_prefill_sm90_bf16_d192",
    "dense_prefill_dq_sm90_bf16_d192",
    "dense_prefill_dkdv_sm90_bf16_d192",
    "mqa_logits_sm100_e4m3_pages_h64",
)


def case(name: str) -> Case:
    return next(case for case in every_case() if case.name == name)


def attention_kernels() -> dict[str, KernelEntry]:
    """Return the built kernels whose clocks must be recorded: of those that loop over keys the ones for which there is a case."""
    kernels = load_artifacts().manifest.kernels
    prefills = ("sparse_prefill", "dense_prefill", "masked_prefill", "dense_prefill_dq", "dense_prefill_dkdv")
    backward = ("sparse_prefill_dq", "sparse_prefill_dkv")
    with_keys = ("dense_decode", "sparse_decode", *prefills, *backward, "mqa_logits")
    wanted = {name: entry for name, entry in kernels.items() if entry.op in with_keys and entry.arch in golden_clocks.GPU_OF}
    return {name: entry for name, entry in wanted.items() if golden_clocks.case_of(entry) is not None}


def check(name: str) -> None:
    """Compare the clocks of a kernel with the recorded ones."""
    found = clocks(attention_kernels()[name])
    assert found is not None
    changed = list(differences({name: read()[name]}, {name: found}))
    assert not changed, "\n".join([f"predicted clocks are not as recorded; if that is meant: {AGAIN} {name}", *changed])


@pytest.mark.parametrize("name", ["dense_decode_sm90_bf16_cluster1", "sparse_decode_sm100_bf16_latent_cluster1"])
def test_decode_loads_only_the_query_rows_that_a_row_has(name: str) -> None:
    entry, values = attention_kernels()[name], constants("H200" if "sm90" in name else "B200")
    few, many = (cluster_run(clock_kernel(entry, values, Setting(64.0, rows=rows), 2)).busy[HBM] for rows in (16, 64))
    assert many - few == pytest.approx((64 - 16) * D_QK * ELEMENT_BYTES / 64 / prod(entry.cluster), rel=0.01)  # of one CTA


@pytest.mark.in_turn
@pytest.mark.parametrize("name", STRUCTURES)
def test_kernels_take_the_clocks_that_are_recorded(name: str) -> None:
    check(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(attention_kernels().keys() - set(STRUCTURES)))
def test_every_kernel_takes_the_clocks_that_are_recorded(name: str) -> None:
    check(name)


def test_every_attention_kernel_is_recorded() -> None:
    assert attention_kernels().keys() == read().keys(), f"other kernels are built than are recorded: {AGAIN}"


def test_a_change_beyond_the_limit_is_a_readable_difference() -> None:
    before = {"a": {"block": 3000.0, "fixed": 7000.0}, "b": {"block": 1000.0, "fixed": 1.0}, "c": {"block": 1.0, "fixed": 1.0}}
    after = {"a": {"block": 3000 * (1 + 1.5 * LIMIT), "fixed": 0.0}, "b": {"block": 1000 * (1 - LIMIT / 2), "fixed": 9.0}}
    assert list(differences(before, after)) == [
        "a: 3,000 -> 3,090 clocks a block (+3.0 %)",
        "c: recorded, but not timed any more",
    ]
    assert list(differences({}, {"a": before["a"]})) == ["a: not recorded"]


def test_recording_one_kernel_keeps_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(golden_clocks, "FILE", tmp_path / "clocks.json")
    monkeypatch.setattr(golden_clocks, "clocks", lambda entry: {"block": 1234.0, "fixed": 5.0})
    golden_clocks.main(["dense_decode_sm90_bf16_cluster1"])
    golden_clocks.main(["dense_decode_sm90_bf16_cluster2"])
    assert capsys.readouterr().out.splitlines() == [f"dense_decode_sm90_bf16_cluster{number}: not recorded" for number in (1, 2)]
    assert json.loads((tmp_path / "clocks.json").read_text()).keys() == {f"dense_decode_sm90_bf16_cluster{number}" for number in (1, 2)}


def test_the_file_has_one_line_a_kernel() -> None:
    assert FILE.read_text().count("\n") == len(read()) + 2


def time_on_h200(case: Case, end: str) -> RowTime:
    return time_of(case, "H200", end, row_clocks(case, "H200", end))[0]


def test_a_decode_row_adds_up() -> None:
    """D12 has one tile for each CTA, and a combine."""
    (clocks,) = row_clocks(case("D12.h16"), "H200", NOMINAL)
    assert clocks.kernel is not None
    assert clocks.kernel.block > 2176  # what the products of a tile take alone
    time, longest = time_of(case("D12.h16"), "H200", NOMINAL, [clocks])
    assert longest == 0
    assert time.us == pytest.approx(sum(time.terms.values()))
    assert time.terms["blocks"] == pytest.approx(clocks.kernel.block / time.ghz / 1e3)
    assert time.terms["combine"] > 1
    assert time.binds == "fixed"
    assert all(0 < share < 1 for share in clocks.kernel.use.values())
    assert all(sum(shares.values()) < 1.01 for shares in clocks.kernel.waits.values())
    score = clocks.kernel.waits["score"]
    assert sum(score.values()) > 0.2


def test_a_stream_has_a_range() -> None:
    found = clock_of(case("K1.656_128"), "H200")
    assert found["low_us"] <= found["us"] <= found["high_us"]
    assert found["low_us"] < found["high_us"]
    assert found["kernel"] is None
    fast, slow = (time_on_h200(case("K1.656_128"), end).us for end in (FAST, SLOW))
    assert (found["low_us"], found["high_us"]) == (fast, slow)
    whole = clock_document(["sm90"], ["H200"], [], None)
    assert whole["constants"]["H200"].keys() == {NOMINAL, FAST, SLOW}


def test_a_row_without_a_prediction_has_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise NoLaunchError("no model of it")

    monkeypatch.setattr(module, "launch_on", refuse)
    assert clock_of(case("D1.fixed"), "H200") == {"reason": "no model of it"}


def test_combine_takes_longer_with_more_to_merge() -> None:
    one, many = (time_on_h200(case(name), NOMINAL) for name in ("C1.two", "C1.many"))
    assert one.binds == "HBM"  # as many CTAs as run at once
    assert many.binds in ("latency", "fixed")  # of loads that wait for each other: lengths, lse, rows
    assert one.us > many.us > 2
