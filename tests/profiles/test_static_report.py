"""The static report against a manifest made up for it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from benching import ENTRY

from cute_mla.manifest import Manifest
from cute_mla.profiles.static_report import kernel_report, static_report


def test_a_kernel_is_set_against_what_the_machine_has() -> None:
    report = kernel_report(ENTRY)
    assert (report.threads, report.cluster, report.stack_bytes) == (512, 2, 8)
    assert report.register_share == 1.0
    assert report.smem_share == 0.5
    assert report.roles == ("load (4 warps)", "score (4 warps)")
    assert list(report.instructions.items()) == [("HGMMA", 44), ("BAR", 10), ("FMUL", 10)]


@pytest.mark.parametrize(
    ("ops", "names"), [(["dense_decode", "combine"], ["combine_sm90", ENTRY.name]), (["combine"], ["combine_sm90"]), (["split_plan"], [])]
)
def test_only_the_wanted_ops_are_reported_by_name(ops: list[str], names: list[str]) -> None:
    combine = replace(ENTRY, name="combine_sm90", op="combine")
    manifest = Manifest({ENTRY.name: ENTRY, combine.name: combine})
    assert [report.name for report in static_report(manifest, "sm90", ops)] == names
    assert static_report(manifest, "sm100", ops) == []
