"""The folder of a Hugging Face kernel: what is in it, and that it works under another name, alone and beside another version.

`make test-transformers` loads it with the package `kernels`.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from cute_mla.aot_build import hub_kernel
from cute_mla.aot_build.hub_kernel import BUILD, digests, make_hub_kernel
from cute_mla.aot_build.tools import ToolError
from cute_mla.aot_build.wheel import git
from cute_mla.manifest import Manifest, Provenance
from cute_mla.runtime.artifacts import artifacts_folder
from tests.support.kernel_module import decode, load
from tests.support.tree import ROOT

OUTSIDE = {"cuda", "numpy", "safetensors", "torch", "transformers"} | set(sys.stdlib_module_names)


@pytest.fixture(scope="module")
def build(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the build of that tree and of the kernels that are built here."""
    return make_hub_kernel(checkout, artifacts_folder(), tmp_path_factory.mktemp("kernel"))


def metadata_of(build: Path) -> dict[str, Any]:
    """Return the metadata of a build."""
    read: dict[str, Any] = json.loads((build / "metadata.json").read_text())
    return read


def test_the_metadata(build: Path, checkout: Path) -> None:
    metadata = metadata_of(build)
    assert build.parts[-2:] == BUILD.parts
    assert metadata["name"] == "cute-mla"
    assert metadata["id"].isidentifier()
    assert (metadata["license"], metadata["python-depends"]) == ("Apache-2.0", [])
    assert metadata["backend"] == {"type": "cuda", "archs": ["9.0a", "10.0f", "12.0f"]}
    assert metadata["digest"] == {"algorithm": "sha256", "files": digests(build)}
    commit = git(checkout, "rev-parse", "HEAD").strip()
    assert metadata["provenance"]["kernel"] == {"commit": commit, "dirty": False}
    recorded = Provenance.load(build / "artifacts")
    assert recorded is not None
    assert (recorded.commit, recorded.clean) == (commit, True)


def test_every_kernel_and_no_compiler(build: Path) -> None:
    files = set(metadata_of(build)["digest"]["files"])
    for entry in Manifest.load(artifacts_folder()).kernels.values():
        assert {f"artifacts/{entry.cubin}", f"artifacts/{entry.ptx}"} <= files
    assert "LICENSE" in files
    rooms = {name.partition("/")[0] for name in files}
    assert rooms >= {"api", "integrations", "layer", "runtime", "simulator"}
    assert not rooms & {"aot_build", "cli", "engines", "kernels", "profiles", "testing"}
    assert not [name for name in files if "__pycache__" in name]


def test_imports_are_relative_and_lead_into_the_folder(build: Path) -> None:
    for path in build.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                assert {alias.name.partition(".")[0] for alias in node.names} <= OUTSIDE, path
            elif isinstance(node, ast.ImportFrom) and not node.level:
                assert str(node.module).partition(".")[0] in OUTSIDE, path
            elif isinstance(node, ast.ImportFrom):
                base = path.parents[node.level - 1].joinpath(*(node.module or "").split("."))
                for alias in node.names:
                    found = (base.with_suffix(".py"), base / "__init__.py", (base / alias.name).with_suffix(".py"))
                    assert any(each.is_file() for each in found), f"{path}: {ast.unparse(node)}"


def test_no_module_names_the_namespace_of_the_ops(build: Path) -> None:
    """torch.ops.cute_mla and cute_mla::op are there in no process that has the kernel alone."""
    for path in build.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute):
                assert node.attr != "cute_mla", f"{path}:{node.lineno}"
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                assert "cute_mla::" not in node.value, f"{path}:{node.lineno}"


def test_a_process_without_cute_mla_and_cuda_python(build: Path) -> None:
    command = [sys.executable, "-m", "tests.aot_build.hub_session", str(build), "sm100"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, timeout=300)
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert seen == {"findings": [], "traced": True, "ops": seen["ops"], "others": [], "version": seen["version"]}
    assert seen["ops"]


def test_two_versions_in_one_process(build: Path, checkout: Path, tmp_path: Path) -> None:
    """Another version, with local changes, beside the first one: other ids, other ops, and devices of their own."""
    source = checkout / "cute_mla" / "__init__.py"
    text = source.read_text()
    source.write_text(text.replace('__version__ = "', '__version__ = "9'))
    try:
        later = make_hub_kernel(checkout, artifacts_folder(), tmp_path)
    finally:
        source.write_text(text)
    assert metadata_of(later)["provenance"]["kernel"]["dirty"] is True
    one, other = load(build), load(later)
    assert one.__name__ != other.__name__
    assert other.__version__ == f"9{one.__version__}"
    first, findings = decode(one, "sm90")
    second, more = decode(other, "sm90")
    assert findings == more == []
    assert torch.equal(first, second)
    assert getattr(torch.ops, one.__name__).merge_states is not getattr(torch.ops, other.__name__).merge_states
    states = torch.zeros(2, 1, 512).bfloat16(), torch.zeros(2, 1)
    with one.simulate("sm90", 2), pytest.raises(ValueError, match="got CPU tensors"):  # not the other's device
        other.merge_states([states[0]], [states[1]])


def test_the_same_commit_gives_the_same_bytes(build: Path, checkout: Path, tmp_path: Path) -> None:
    stale = tmp_path / BUILD / "stale.py"
    stale.parent.mkdir(parents=True)
    stale.write_text("")
    again = make_hub_kernel(checkout, artifacts_folder(), tmp_path)
    assert metadata_of(again) == metadata_of(build)
    assert digests(again) == digests(build)


def test_kernels_of_other_sources_are_not_packed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(artifacts: Path) -> None:
        raise ToolError("2 kernels were not built from these sources")

    monkeypatch.setattr(hub_kernel, "check_current", refuse)
    assert hub_kernel.main(["--out", str(tmp_path)]) == 1
    assert "2 kernels were not built from these sources" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
