"""A sample of broken machine code. `python -m tests.mutation machine` has more."""

from __future__ import annotations

import random

import pytest

from cute_mla.runtime.artifacts import load_artifacts
from cute_mla.simulator.sass.control_codes import hazards
from cute_mla.simulator.sass.listing import read_listing
from tests.mutation import machine
from tests.mutation.bench import processes, text_of
from tests.mutation.campaign import CAMPAIGNS
from tests.mutation.report import REASONS, explanations, unexplained

LINES = (  # code, and its control code: stall, scoreboards for results and operands, wait mask
    ("@P0 SYNCS.ARRIVE.TRANS64.A1T0 RZ, [UR4+0x8], RZ", (1, 7, 7, 0)),
    ("SYNCS.ARRIVE.TRANS64 RZ, [R4+URZ], R5", (1, 7, 7, 0)),
    ("SYNCS.PHASECHK.TRANS64.TRYWAIT P1, [R4+URZ], R5", (2, 0, 7, 0)),
    ("BAR.SYNC.DEFER_BLOCKING 0x1, 0x80", (1, 7, 7, 9)),
    ("WARPGROUP.DEPBAR.LE gsb0, 0x0", (1, 7, 7, 0)),
    ("HGMMA.64x64x16.F32.BF16 R24, gdesc[UR8], R24, gsb0", (1, 7, 7, 0)),
    ("LDG.E R4, desc[UR4][R2.64+0x10]", (1, 0, 1, 0)),
    ("FSEL R5, R6, -INF , !P2", (5, 7, 7, 0)),
    ("FADD R5.reuse, R6, R7", (1, 7, 7, 0)),
)
HIGH = {  # upper words of the encodings of edited control codes
    "wait for scoreboard 0 dropped": 8 << 11 | 7 << 5 | 7 << 8 | 1,
    "wait for scoreboard 3 dropped": 1 << 11 | 7 << 5 | 7 << 8 | 1,
    "write scoreboard not held": 7 << 5 | 1 << 8 | 1,
    "read scoreboard not held": 7 << 8 | 1,
    "stall of 1": 7 << 5 | 7 << 8 | 1,
    "stall halved": 7 << 5 | 7 << 8 | 2,
}
KERNEL, SAMPLE = "split_plan_sm90_i32", 40


def listing() -> str:
    """Return the snippet as nvdisasm prints it."""
    text = ["k:"]
    for index, (code, (stall, write, read, waits)) in enumerate(LINES):
        high = (stall | write << 5 | read << 8 | waits << 11) << 41
        text += [f"  /*{index * 16:04x}*/  {code} ; /* 0x{0:016x} */", f"  /* 0x{high:016x} */"]
    return "\n".join(text)


def test_what_is_broken_and_how() -> None:
    text = listing()
    broken = {}
    for mutation in machine.find(text):
        line = mutation.apply(text).splitlines()[1 + mutation.line // 16 * 2 :]
        changed = " ".join(line[0].split("*/", 1)[1].split(";", maxsplit=1)[0].split())
        broken[mutation.kind, mutation.line // 16] = (
            changed if changed != LINES[mutation.line // 16][0] else int(line[1].split()[1], 16) >> 41
        )
    expected = {
        ("arrival dropped", 0): "NOP",
        ("guard turned", 0): "@!P0 SYNCS.ARRIVE.TRANS64.A1T0 RZ, [UR4+0x8], RZ",
        ("guard dropped", 0): "SYNCS.ARRIVE.TRANS64.A1T0 RZ, [UR4+0x8], RZ",
        ("another mbarrier", 0): "@P0 SYNCS.ARRIVE.TRANS64.A1T0 RZ, [UR4+0x10], RZ",
        ("arrival with bytes dropped", 1): "NOP",
        ("bytes not expected", 1): "SYNCS.ARRIVE.TRANS64.A1T0 RZ, [R4+URZ], RZ",
        ("phase not waited for", 2): "PLOP3.LUT P1, PT, PT, PT, PT, 0x80, 0x0",
        ("named barrier dropped", 3): "NOP",
        ("named barrier only arrived at", 3): "BAR.ARV 0x1, 0x80",
        ("wait for products dropped", 4): "NOP",
        ("wait for products 1 looser", 4): "WARPGROUP.DEPBAR.LE gsb0, 0x1",
        ("products not closed", 5): "HGMMA.64x64x16.F32.BF16 R24, gdesc[UR8], R24",
        ("result in the next register", 6): "LDG.E R5, desc[UR4][R2.64+0x10]",
        ("address without offset", 6): "LDG.E R4, desc[UR4][R2.64]",
        ("result in the next register", 7): "FSEL R6, R6, -INF , !P2",
        ("another source", 7): "FSEL R5, R7, -INF , !P2",
        ("selection turned", 7): "FSEL R5, R6, -INF , P2",
        ("result in the next register", 8): "FADD R6.reuse, R6, R7",
        ("another source", 8): "FADD R5.reuse, R6, R8",
    }
    places = (3, 3, 6, 6, 7, 7)
    controls = {(kind, place): high for (kind, high), place in zip(HIGH.items(), places, strict=True)}
    controls["write scoreboard not held", 2] = 7 << 5 | 7 << 8 | 2
    assert broken == expected | controls


def test_broken_control_codes_are_found_when_the_code_is_loaded() -> None:
    entry = load_artifacts().manifest.kernels[KERNEL]
    text = text_of(entry, "sass")
    sites = machine.find(text, machine.CONTROL)
    assert {site.kind for site in sites} > {"write scoreboard not held", "read scoreboard not held", "stall of 1"}
    waits = [site for site in sites if site.kind.startswith("wait") or site.kind == "write scoreboard not held"]
    found = [bool(hazards(read_listing(site.apply(text)))) for site in random.Random(0).sample(waits, SAMPLE)]
    assert sum(found) >= 0.9 * SAMPLE


@pytest.mark.parametrize("kernel", ["cache_gather_sm90_bf16_fp8_584"])
def test_broken_machine_code_is_noticed(kernel: str) -> None:
    campaign = CAMPAIGNS["machine"]
    mutations = campaign.draw(load_artifacts().manifest.kernels[kernel], 4, seed=1)
    with processes(1) as pool:  # which limits its memory, and ends runs at the first finding
        lines = pool.submit(campaign.judge, kernel, mutations, 1).result()
    assert len([line for line in lines if line.noticed != "no case"]) == 4
    assert unexplained(lines, explanations(REASONS["machine"])) == []


def test_explanations_are_about_some_kind() -> None:
    """Else a pattern is out of date."""
    kinds = [kind.name for kind in machine.KINDS]
    assert len(set(kinds)) == len(kinds)
    for known in explanations(REASONS["machine"]):
        assert any(known.kind.fullmatch(kind) for kind in kinds), known.kind.pattern
