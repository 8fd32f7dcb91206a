"""Cases spread over processes: the real runner, device and kernels, and what happens without kernels."""

from __future__ import annotations

from pathlib import Path

import pytest

from cute_mla.runtime.artifacts import FOLDER_VARIABLE
from cute_mla.runtime.errors import ArtifactError
from cute_mla.testing.cases.dense_decode import DenseDecodeCase
from cute_mla.testing.runner import Target, run_all, schedules

SMALL = DenseDecodeCase(s_k=20, h_q=4, sm_count=1)
LARGE = DenseDecodeCase("fp16", batch=2, s_k=100, h_q=4, outputs="strided", sm_count=2)


def test_every_job_comes_back_under_its_index() -> None:
    target = Target("sm90", "sim", schedules(2, 0))
    results = dict(run_all([(SMALL, target, ""), (LARGE, target, "cut")], workers=2))
    assert sorted(results) == [0, 1]
    assert [(record.case, record.schedule, record.status) for record in results[0]] == [
        (SMALL.id, "round_robin", "passed"),
        (SMALL.id, "lazy", "passed"),
    ]
    assert [(record.case, record.status, record.passed) for record in results[1]] == [(LARGE.id, "reduced", True)] * 2


def test_missing_kernels_end_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    with pytest.raises(ArtifactError, match="no manifest"):
        list(run_all([(SMALL, Target("sm90", "sim"), "")], workers=1))
