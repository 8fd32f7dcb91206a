"""Constants from microbenchmarks: formulas of names that exist, tables that the clock reads, and nothing from a failed measurement."""

from __future__ import annotations

import re
import tomllib
from dataclasses import fields

import pytest

from cute_mla.profiles.clock import constants as clock_constants
from cute_mla.profiles.clock.constants import FILE, Constants, constants, gpu_of_device, gpus, sources
from cute_mla.profiles.measured_constants import FORMULAS, Measured, measured_constants, with_measured
from cute_mla.profiles.roofline import GPUS
from tests.profiles.microbenchmark_lines import line, lines
from tests.support.tree import ROOT

SOURCES = "".join(path.read_text() for path in (ROOT / "profiles" / "microbenchmarks").iterdir())
LITERALS = {"_", *re.findall(r'"(\w{2,})"', SOURCES), *re.findall(r"OP\((\w+),", SOURCES)}
TEXT = FILE.read_text()


def is_printed(name: str) -> bool:
    """Return whether a name is put together from literals and numbers of the sources."""
    return re.fullmatch(rf"(?:{'|'.join(LITERALS)}|\d+)*", name) is not None


def test_each_formula_is_of_a_constant_and_of_measurements() -> None:
    assert FORMULAS.keys() <= {field.name for field in fields(Constants)}
    for formula in FORMULAS.values():
        assert all(map(is_printed, (formula.measurement, formula.minus, formula.over))), formula
    assert not is_printed("ss256_tails")
    assert not is_printed("fmma_rate")


def test_constants_are_rounded_and_have_the_formula_as_source() -> None:
    found = measured_constants(lines(mbarrier_hop=50.2, mbarrier_done=33.4, clock_60_ghz=1.98, hbm_16_gbytes=4200.0, special_latency=20.0))
    assert found.gpu == "H200"
    assert found.entries == {
        "arrive_latency": (17, "[H] 2026-12-01, mbarrier_hop - mbarrier_done: 16.8"),
        "phase_latency": (33, "[H] 2026-12-01, mbarrier_done: 33.4"),
        "hbm_bytes": (2121.0, "[H] 2026-12-01, hbm_16_gbytes over clock_60_ghz: 2121"),
        "boost_ghz": (1.98, "[H] 2026-12-01, clock_60_ghz: 1.98"),
        "special_latency": (15, "[H] 2026-12-01, special_latency - 5: 15"),
    }


def test_what_failed_or_makes_no_sense_is_left_out() -> None:
    failed = line("ERROR", None, "fence: an illegal memory access")
    found = measured_constants([*lines(sts128=40.0, sts128_fence=38.0, launch=3.0), "", failed])
    assert (found.entries, found.refused) == ({}, {"fence_clocks": -2.0})


@pytest.mark.parametrize("given", [[], [line("ffma_rate", 1.0)], lines("NVIDIA A100"), [*lines("NVIDIA H200"), *lines("NVIDIA H100")]])
def test_lines_must_be_of_one_gpu_that_the_clock_knows(given: list[str]) -> None:
    with pytest.raises(ValueError, match="supported: one of H100"):
        measured_constants(given)


def test_the_clock_takes_a_measured_value_for_its_gpu_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    text = with_measured(TEXT, measured_constants(lines(cvt_bf16x2_f32_rate=4.03, mbarrier_done=34.0)))
    text = with_measured(text, measured_constants(lines(mbarrier_done=35.0, date="2026-12-02")))
    text = with_measured(text, measured_constants(lines("NVIDIA H100 80GB HBM3", remote_bytes_both=15.5)))
    assert text.startswith(TEXT.rstrip("\n"))  # what is measured stands beside what was assumed
    assert tomllib.loads(text)["measured"] == {
        "H100": {"remote_bytes": {"value": 15.5, "source": "[H] 2026-12-01, remote_bytes_both: 15.5"}},
        "H200": {
            "convert_clocks": {"value": 4, "source": "[H] 2026-12-01, cvt_bf16x2_f32_rate: 4.03"},
            "phase_latency": {"value": 35, "source": "[H] 2026-12-02, mbarrier_done: 35"},
        },
    }
    monkeypatch.setattr(clock_constants, "_document", lambda: tomllib.loads(text))
    assert [constants("H200", end).convert_clocks for end in ("value", "fast", "slow")] == [4, 4, 4]
    assert [constants("H800", end).convert_clocks for end in ("value", "fast", "slow")] == [2, 1, 8]
    assert constants("H100").remote_bytes == 15.5


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('source = "[P] CUDA programming guide: 32 banks of 4 bytes"', 'source = ""', "clock of H200: shared_bytes has no source"),
        ("uniform_clocks", "uniform_clock", "clock of H200: uniform_clock, uniform_clocks missing or unknown"),
        (
            "boost_use = { value",
            "boost_use = { fast",
            "boost_use has fast, source; supported: value, optionally with fast",
        ),
    ],
)
def test_mistakes_in_the_file_are_named(monkeypatch: pytest.MonkeyPatch, old: str, new: str, message: str) -> None:
    assert old in TEXT
    monkeypatch.setattr(clock_constants, "_document", lambda: tomllib.loads(TEXT.replace(old, new)))
    with pytest.raises(ValueError, match=message):
        constants("H200")


def test_every_gpu_of_the_rooflines_has_constants_with_sources() -> None:
    assert set(gpus()) == GPUS.keys()
    for gpu in gpus():
        assert constants(gpu).arch == GPUS[gpu].arch
        assert sources(gpu).keys() == {field.name for field in fields(Constants)} - {"gpu", "arch", "sm_count"}
        assert GPUS[gpu].tflops <= constants(gpu).product_flops * constants(gpu).sm_count * constants(gpu).boost_ghz / 1e3 * 1.01


def test_a_gpu_whose_name_has_spaces_has_a_table() -> None:
    text = with_measured(TEXT, Measured("RTX 5090", {"shared_latency": (30, "[H] made up")}, {}))
    assert tomllib.loads(text)["measured"]["RTX 5090"]["shared_latency"]["value"] == 30
    assert gpu_of_device("NVIDIA RTX PRO 6000 Blackwell Workstation Edition") == "RTX PRO 6000"
    assert gpu_of_device("NVIDIA GB10") == "GB10"
