"""The constants of the analytic model: each has a source, and its two ends the right way round."""

from __future__ import annotations

from dataclasses import fields

import pytest

from cute_mla.profiles.model.machines import FILE, Machine, machines, parse
from cute_mla.profiles.roofline import GPUS
from cute_mla.spec.arch import ARCHS

TEXT = FILE.read_text(encoding="utf-8")


def test_every_gpu_of_the_rooflines_is_known() -> None:
    assert machines().keys() == GPUS.keys()
    for name, bounds in machines().items():
        assert bounds.best.arch == GPUS[name].arch
        assert bounds.best.sm_count == ARCHS[bounds.best.arch].sm_count
        assert bounds.best.hbm_tbytes == GPUS[name].tbytes, "the roofline's rate of memory"
        assert bounds.sources.keys() == {field.name for field in fields(Machine)} - {"name", "arch", "sm_count"}


def test_rates_are_those_of_the_rooflines_at_some_clock() -> None:
    for name, bounds in machines().items():
        low, high = (end.mma_flops_per_clock * end.sm_count * end.clock_ghz / 1e3 for end in (bounds.worst, bounds.best))
        assert low * 0.999 <= GPUS[name].tflops <= high * 1.01, name


def test_clocks_and_microseconds() -> None:
    machine = machines()["H800"].best
    assert machine.us(1600) == pytest.approx(1.0)
    assert machine.bytes_per_clock(3.0, 125) == pytest.approx(15.0)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('source = "[P] CUDA programming guide: 32 banks of 4 bytes"', 'source = ""', "smem_bytes_per_clock has no source"),
        ("best = 1.3, worst = 2.1", "best = 2.1, worst = 1.3", "launch_us is 2.1 at best and 1.3 at worst, which is the wrong way round"),
        ("best = 7.0, worst = 5.5", "best = 5.5, worst = 7.0", "l2_tbytes is 5.5 at best and 7.0 at worst"),
        ("issue_per_clock", "issues_per_clock", "issue_per_clock, issues_per_clock missing or unknown"),
        ("{ value = 4096,", "{ best = 4096,", "mma_flops_per_clock has best, source; supported: value, or best and worst"),
    ],
)
def test_mistakes_are_named(old: str, new: str, message: str) -> None:
    assert old in TEXT
    with pytest.raises(ValueError, match=message):
        parse(TEXT.replace(old, new))
