"""Deliberately broken dense decode kernels: the cases must find each of them wrong.

A bug is planted in the PTX of the built kernel; manifest and API are the real ones. A bug counts as found if the answer is
wrong, the simulator reports a finding, or the call fails, under any of the four schedules.

Two waits are not broken here, since the order of the others implies them: on rope_free, and on kv_ready in the output role.
"""

from __future__ import annotations

import hashlib
import re
import shutil
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import pytest

from cute_mla.manifest import Manifest
from cute_mla.runtime.library import FOLDER_VARIABLE, artifacts_folder
from cute_mla.spec.arch import SM90
from cute_mla.testing.cases import Case
from cute_mla.testing.runner import Target, run_case, schedules

# One CTA walks three requests: enough tiles to go round every ring of buffers, keys past the end, masked rows.
WALK = Case(batch=3, s_q=2, lengths=(500, 70, 300), h_q=9, causal=True, sm_count=1)
PAIR = replace(WALK, h_q=64)  # two row tiles, a cluster of two CTAs
SHORT = replace(WALK, batch=8, lengths=(60,) * 8)  # so short that a role may be several requests ahead of another

WAITS = r"mbarrier\.try_wait\.parity\.shared\.b64 +P1, [^;]*;"
WAIT_COUNT = 15  # kv_free 4, rope_free; kv_ready 4, rope_ready, stats_free; kv_ready 2, probs_ready, stats_ready
NO_WAIT = "setp.eq.u32 P1, 0, 0;"

Break = Callable[[Case, str], None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Break:
    """Returns a function that makes a PTX text the kernel of a case."""
    source = artifacts_folder()

    def install(case: Case, ptx: str) -> None:
        manifest = Manifest.load(source)
        entry = manifest.find(case.op, "sm90", case.problem(SM90).config.name)
        folder = tmp_path / hashlib.sha256(ptx.encode()).hexdigest()[:16]
        shutil.copytree(source, folder)
        (folder / entry.ptx).write_text(ptx)
        broken = replace(entry, ptx_sha256=hashlib.sha256(ptx.encode()).hexdigest())
        Manifest({**manifest.kernels, entry.name: broken}).save(folder)
        monkeypatch.setenv(FOLDER_VARIABLE, str(folder))

    return install


def shipped_ptx(case: Case) -> str:
    folder = artifacts_folder()
    return (folder / Manifest.load(folder).find(case.op, "sm90", case.problem(SM90).config.name).ptx).read_text()


def places(case: Case, pattern: str) -> list[re.Match[str]]:
    """Where a pattern occurs in the PTX of a case's kernel."""
    found = list(re.finditer(pattern, shipped_ptx(case)))
    assert found, f"{pattern!r} does not occur in the PTX: the planted bug is out of date"
    return found


def is_found(install: Break, case: Case, replacement: str, broken: Iterable[re.Match[str]]) -> bool:
    """Breaks the kernel at these places, and says whether a case fails for it."""
    ptx = shipped_ptx(case)
    for place in sorted(broken, key=lambda place: -place.start()):
        ptx = ptx[: place.start()] + place.expand(replacement) + ptx[place.end() :]
    install(case, ptx)
    return any(not run_case(case, Target("sm90", "sim", (schedule,)))[0].passed for schedule in schedules(4, 0))


def survivors(install: Break, case: Case, pattern: str, replacement: str) -> list[str]:
    """Breaks the kernel at each place of a pattern in turn, and returns those that nobody missed."""
    return [place[0] for place in places(case, pattern) if not is_found(install, case, replacement, [place])]


@pytest.mark.parametrize("case", [WALK, PAIR, SHORT], ids=["alone", "cluster", "short"])
def test_the_unbroken_kernel_passes(case: Case, install: Break) -> None:
    install(case, shipped_ptx(case) + "// as it was\n")
    for record in run_case(case, Target("sm90", "sim", schedules(4, 0))):
        assert record.passed, record.reason


@pytest.mark.parametrize("case", [WALK, PAIR], ids=["alone", "cluster"])
def test_a_missing_arrival(case: Case, install: Break) -> None:
    arrivals = r"mbarrier\.arrive\.(?:release\.cluster\.)?shared(?:::cluster)?\.b64 [^;]*;"
    assert survivors(install, case, arrivals, "") == []


@pytest.mark.parametrize(
    ("case", "first", "count"),
    [(WALK, 0, 4), (WALK, 5, 5), (SHORT, 10, 1), (WALK, 13, 1), (SHORT, 14, 1)],
    ids=["kv_free", "kv_ready and rope_ready", "stats_free", "probs_ready", "stats_ready"],
)
def test_missing_waits(case: Case, first: int, count: int, install: Break) -> None:
    waits = places(case, WAITS)
    assert len(waits) == WAIT_COUNT, "the planted bugs are out of date"
    assert is_found(install, case, NO_WAIT, waits[first : first + count])


@pytest.mark.parametrize("case", [WALK, PAIR], ids=["alone", "cluster"])
def test_a_missing_copy(case: Case, install: Break) -> None:
    assert survivors(install, case, r"cp\.async\.bulk\.tensor[^;]*;", "") == []


def test_a_wrong_count_of_bytes(install: Break) -> None:
    assert survivors(install, WALK, r"(mbarrier\.arrive\.expect_tx[^;]*, )%r\d+;", r"\g<1>4096;") == []


def test_a_wrong_count_of_arrivals(install: Break) -> None:
    counts = r"(mbarrier\.init\.shared\.b64 [^;]*, )%r\d+;"
    assert is_found(install, WALK, r"\g<1>3;", places(WALK, counts))


def test_no_wait_for_matrix_products(install: Break) -> None:
    assert survivors(install, WALK, r"wgmma\.wait_group\.sync\.aligned\s+\d;", "") == []


def test_masking_that_does_nothing(install: Break) -> None:
    masks = r"selp\.f32 (\s*%r\d+, (%r\d+)), 0fFF800000"
    assert is_found(install, WALK, r"selp.f32 \1, \2", places(WALK, masks))


def test_unused_rows_that_are_not_cleared(install: Break) -> None:
    assert survivors(install, WALK, r"st\.shared\.v4\.b32 \s*\[[^]]*\], \{0, 0, 0, 0\};", "") == []


def test_lse_in_base_2(install: Break) -> None:
    assert survivors(install, WALK, "0f3F317218", "0f3F800000") == []


RACES = (r"fence\.proxy\.async[^;]*;", r"bar\.sync\s+(1|%r\d+), 128;")


@pytest.mark.xfail(strict=True, reason="shows only as a race, which the simulator does not look for yet")
@pytest.mark.parametrize("pattern", RACES, ids=["proxy fences", "named barriers"])
def test_missing_fences_and_barriers(pattern: str, install: Break) -> None:
    assert is_found(install, WALK, "", places(WALK, pattern))
