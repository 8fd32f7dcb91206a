"""Adapters of serving engines, without the engines: nothing loads one unless its engine asks for it."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from importlib import import_module

import pytest

from tests.support.tree import ROOT

ENTRY_POINTS = {
    group: points
    for group, points in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"].items()
    if group.split(".")[0] in ("vllm", "sglang")
}


@pytest.mark.parametrize("group", ENTRY_POINTS)
def test_an_entry_point_is_a_function_without_arguments(group: str) -> None:
    for target in ENTRY_POINTS[group].values():
        module, _, name = target.partition(":")
        assert getattr(import_module(module), name).__code__.co_argcount == 0


def test_engines_find_their_entry_points() -> None:
    assert ENTRY_POINTS["vllm.general_plugins"] == {"cute_mla": "cute_mla.engines.vllm:register"}
    assert ENTRY_POINTS["sglang.srt.plugins"] == {"cute_mla": "cute_mla.engines.sglang:register"}


def test_nothing_imports_an_engine_unasked() -> None:
    """An import of an engine would fail here: what names one is a finder that refuses."""
    modules = [
        "cute_mla.api",
        "cute_mla.layer",
        *(t.partition(":")[0] for p in ENTRY_POINTS.values() for t in p.values()),
    ]
    code = f"""
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        assert name.split(".")[0] not in ("vllm", "sglang"), name
sys.meta_path.insert(0, Refuse())
import importlib
for module in {modules!r}:
    importlib.import_module(module)
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_no_adapter_is_imported_with_the_package() -> None:
    code = "import sys, cute_mla.api, cute_mla.layer; sys.exit(any(name.startswith('cute_mla.engines') for name in sys.modules))"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
