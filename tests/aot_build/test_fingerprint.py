"""A fingerprint changes with everything that decides a kernel's bytes, and with nothing else."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from cute_mla.aot_build import fingerprint as module
from cute_mla.aot_build.fingerprint import fingerprint, transitive_sources
from cute_mla.aot_build.variants import Variant
from cute_mla.spec.arch import SM90
from tests.aot_build.tma_copy import TmaCopyConfig

KERNEL = "cute_mla.kernels.sample.kernel"
VARIANT = Variant("sample", SM90, TmaCopyConfig(), KERNEL)

SOURCES = {
    "__init__.py": "",
    "kernels/__init__.py": "",
    "kernels/sample/__init__.py": "",
    "kernels/sample/kernel.py": "from ...spec import abi\nfrom cute_mla.kernels.parts.tma import copy\nimport os\n",
    "kernels/parts/__init__.py": "",
    "kernels/parts/tma.py": "def f():\n    from . import barriers\n",
    "kernels/parts/barriers.py": "import cute_mla.spec.mla\n",
    "kernels/other.py": "",
    "spec/__init__.py": "",
    "spec/abi.py": "",
    "spec/mla.py": "",
    "spec/unused.py": "",
}


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """Return a small package of the same shape."""
    for name, text in SOURCES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_transitive_sources_follow_every_form_of_import(package: Path) -> None:
    assert transitive_sources(KERNEL, package).keys() == {
        "cute_mla.kernels",
        "cute_mla.kernels.sample",
        KERNEL,
        "cute_mla.kernels.parts",
        "cute_mla.kernels.parts.tma",
        "cute_mla.kernels.parts.barriers",
        "cute_mla.spec",
        "cute_mla.spec.abi",
        "cute_mla.spec.mla",
    }


@pytest.mark.parametrize("name", sorted(SOURCES))
def test_only_an_edit_of_what_the_kernel_imports_changes_the_fingerprint(package: Path, name: str) -> None:
    before = fingerprint(VARIANT, package)
    assert fingerprint(VARIANT, package) == before
    (package / name).write_text(SOURCES[name] + "# edited\n")
    assert (fingerprint(VARIANT, package) == before) == (name in ("__init__.py", "kernels/other.py", "spec/unused.py"))


def test_a_renamed_file_changes_the_fingerprint(package: Path) -> None:
    before = fingerprint(VARIANT, package)
    shutil.move(package / "spec/mla.py", package / "spec/mla2.py")
    assert fingerprint(VARIANT, package) != before


def test_variant_options_and_tools_change_the_fingerprint(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = fingerprint(VARIANT, package)
    seen = {before, fingerprint(replace(VARIANT, config=TmaCopyConfig("stack")), package)}
    monkeypatch.setattr(module, "tool_versions", lambda: {"nvidia-cutlass-dsl": "4.9.0"})
    seen.add(fingerprint(VARIANT, package))
    monkeypatch.setattr(module, "compile_options", lambda _: "--opt-level 2")
    seen.add(fingerprint(VARIANT, package))
    assert len(seen) == 4


def test_the_builds_own_code_is_part_of_it(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = fingerprint(VARIANT, package)
    copied = package / "aot_build"
    shutil.copytree(module._BUILD_FOLDER, copied)
    monkeypatch.setattr(module, "_BUILD_FOLDER", copied)
    (copied / "wheel.py").write_text("# packs otherwise\n")
    assert fingerprint(VARIANT, package) == before
    (copied / "gates.py").write_text("# no gates\n")
    assert fingerprint(VARIANT, package) != before


def test_an_unknown_module_is_refused(package: Path) -> None:
    with pytest.raises(ValueError, match="no module nowhere_to_be_found"):
        transitive_sources("nowhere_to_be_found", package)
