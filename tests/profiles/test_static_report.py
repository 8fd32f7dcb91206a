"""The static report against a manifest made up for it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cute_mla.manifest import Manifest
from cute_mla.profiles.kernel_stats.static_report import MIX_CLASSES, instruction_mix, static_figures, static_report
from tests.profiles.benching import ENTRY


def test_a_kernel_is_set_against_what_the_machine_has() -> None:
    report = static_figures(ENTRY)
    assert (report.threads, report.cluster, report.stack_bytes) == (512, 2, 8)
    assert report.register_share == 1.0
    assert report.smem_share == 0.5
    assert report.roles == ("load (4 warps)", "score (4 warps)")
    assert report.mix == dict.fromkeys(MIX_CLASSES, 0) | {"tensor": 44, "sync": 10, "float": 10}
    assert list(report.instructions.items()) == [("HGMMA", 44), ("BAR", 10), ("FMUL", 10)]


@pytest.mark.parametrize(
    ("ops", "names"), [(["dense_decode", "combine"], ["combine_sm90", ENTRY.name]), (["combine"], ["combine_sm90"]), (["split_plan"], [])]
)
def test_only_the_wanted_ops_are_reported_by_name(ops: list[str], names: list[str]) -> None:
    combine = replace(ENTRY, name="combine_sm90", op="combine")
    manifest = Manifest({ENTRY.name: ENTRY, combine.name: combine})
    assert [report.name for report in static_report(manifest, "sm90", ops)] == names
    assert static_report(manifest, "sm100", ops) == []


@pytest.mark.parametrize(
    ("mix_class", "mnemonics"),
    [
        ("tensor", "HGMMA QGMMA HMMA QMMA UTCHMMA UTCQMMA"),
        ("tma", "UTMALDG UTMASTG UBLKCP"),
        ("sync", "SYNCS BAR WARPGROUP FENCE MEMBAR CGAERRBAR ERRBAR UCGABAR_WAIT ACQBULK PREEXIT USETMAXREG UTCBAR UTCATOMSWS"),
        ("mufu", "MUFU"),
        ("convert", "F2FP F2I I2F"),
        ("float", "FADD FFMA FMNMX FMUL FSEL FSETP HFMA2 HADD2"),
        ("memory", "LDG LDS LDSM LDL STG STS STSM STL CCTL ATOMG RED LDTM STTM UTCCP"),
        ("shuffle", "SHFL VOTE ELECT"),
        ("integer", "IADD3 IMAD ISETP IABS LOP3 LEA SHF SEL PRMT POPC PLOP3 VIADD VIMNMX VIADDMNMX UIADD3 UIMAD ULOP3 USHF ULEA"),
        ("control", "BRA BSSY BSYNC CALL RET EXIT NANOSLEEP NOP"),
        ("other", "MOV UMOV R2UR S2R S2UR CS2R P2R LDC ULDC"),
    ],
)
def test_each_mnemonic_belongs_to_one_class(mix_class: str, mnemonics: str) -> None:
    names = mnemonics.split()
    assert instruction_mix(dict.fromkeys(names, 1)) == dict.fromkeys(MIX_CLASSES, 0) | {mix_class: len(names)}
