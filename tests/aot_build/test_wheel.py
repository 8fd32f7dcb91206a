"""The wheel: what is in it, that it is the same made again, and that it proves itself where there is neither checkout nor compiler."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import venv
import zipfile
from collections.abc import Iterator
from glob import glob
from importlib.metadata import distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from cute_mla.aot_build import rebuild as rebuilding
from cute_mla.aot_build import wheel as packing
from cute_mla.aot_build.rebuild import Shipped, rebuild, unpack
from cute_mla.aot_build.tools import ToolError
from cute_mla.aot_build.wheel import git, make_wheel, stale_kernels
from cute_mla.manifest import Manifest, ManifestError, Provenance, manifest_sha256
from cute_mla.runtime.artifacts import artifacts_folder
from cute_mla.testing.suite import suite
from tests.support.tree import ROOT

MOST_BYTES = 50_000_000
SMALL = "split_plan_sm90_i32"


@pytest.fixture(scope="module")
def wheel(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the wheel of that tree and of the kernels that are built here."""
    return make_wheel(checkout, artifacts_folder(), tmp_path_factory.mktemp("dist"))


def test_every_module_and_every_artefact_once_and_nothing_else(wheel: Path) -> None:
    assert wheel.name.endswith("-py3-none-any.whl")
    assert wheel.stat().st_size < MOST_BYTES
    names = zipfile.ZipFile(wheel).namelist()
    assert len(names) == len(set(names))
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {"cute_mla"}
    expected = set(glob("cute_mla/**/*.py", root_dir=ROOT, recursive=True))  # noqa: PTH207  # unlike Path.glob it follows the links
    assert {"cute_mla/cli/build.py", "cute_mla/aot_build/build.py", "cute_mla/profiles/predictions.py"} <= expected
    assert {name for name in names if name.endswith(".py")} == expected
    assert "cute_mla/py.typed" in names
    kernels = Manifest.load(artifacts_folder()).kernels.values()
    shipped = {"manifest.json", "provenance.json", *(name for entry in kernels for name in (entry.cubin, entry.ptx))}
    assert {Path(name).name for name in names if name.startswith("cute_mla/artifacts/")} == shipped


def test_the_provenance_says_what_the_manifest_does_not(wheel: Path, checkout: Path, tmp_path: Path) -> None:
    shipped = unpack(wheel, tmp_path)
    provenance = shipped.provenance
    assert provenance.commit == git(checkout, "rev-parse", "HEAD").strip()
    assert provenance.clean
    assert wheel.name == f"cute_mla-{provenance.version}-py3-none-any.whl"
    assert provenance.manifest_sha256 == manifest_sha256(shipped.folder)
    assert provenance.tools.keys() == {"python", "platform", "setuptools", "torch"}
    entry = shipped.manifest.kernels[SMALL]
    assert {"nvidia-cutlass-dsl", "ptxas"} <= entry.tools.keys()
    assert not provenance.tools.keys() & entry.tools.keys()


@pytest.mark.slow
def test_made_again_it_is_the_same_bytes(wheel: Path, checkout: Path, tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        again = make_wheel(checkout, artifacts_folder(), tmp_path)
    finally:
        os.umask(before)
    assert again.read_bytes() == wheel.read_bytes()


@pytest.mark.slow
def test_local_changes_are_packed_and_recorded(checkout: Path, tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    shutil.copytree(checkout, tree, symlinks=True)
    (tree / "cute_mla" / "py.typed").unlink()
    (tree / "cute_mla" / "layer" / "another.py").write_text("")
    made = make_wheel(tree, artifacts_folder(), tmp_path)
    names = zipfile.ZipFile(made).namelist()
    assert "cute_mla/layer/another.py" in names
    assert "cute_mla/py.typed" not in names
    shipped = unpack(made, tmp_path / "unpacked")
    assert not shipped.provenance.clean
    with pytest.raises(ToolError, match="with local changes, which no checkout has"):
        rebuild(shipped, [SMALL], tree, tmp_path / "work")


def test_kernels_of_other_sources_are_not_packed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels = dict(Manifest.load(artifacts_folder()).kernels)
    foreign = kernels.pop(SMALL)
    kernels["split_plan_sm90_other"] = foreign
    monkeypatch.setattr(packing, "fingerprint", lambda variant: foreign.fingerprint)
    stale = stale_kernels(Manifest(kernels))
    assert {SMALL, "split_plan_sm90_other"} <= set(stale)
    monkeypatch.setattr(packing.Manifest, "load", lambda folder: Manifest(kernels))
    assert packing.main(["--artifacts", str(tmp_path), "--out", str(tmp_path / "dist")]) == 1
    assert "were not built from these sources" in capsys.readouterr().err
    assert not (tmp_path / "dist").exists()


@pytest.mark.parametrize("kind", ["cubin", "ptx"])
def test_a_damaged_file_is_not_packed(checkout: Path, tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "artifacts"
    entry = Manifest.load(artifacts_folder()).kernels[SMALL]
    folder.mkdir()
    for name in (entry.cubin, entry.ptx):
        shutil.copyfile(artifacts_folder() / name, folder / name)
    Manifest({SMALL: entry}).save(folder)
    with (folder / getattr(entry, kind)).open("ab") as file:
        file.write(b"\n")
    with pytest.raises(ManifestError, match=rf"{SMALL}\.{kind} is damaged: sha256 [0-9a-f]{{64}}, the manifest says"):
        make_wheel(checkout, folder, tmp_path / "dist")
    assert not (tmp_path / "dist").exists()


def needed(name: str, seen: set[str]) -> Iterator[str]:
    """Yield a distribution and all that it requires here, without extras."""
    if name in seen:
        return
    seen.add(name)
    yield name
    for text in distribution(name).requires or ():
        requirement = Requirement(text)
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            yield from needed(requirement.name, seen)


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return an environment with the wheel and what it requires, by links to what is installed here. Without the build extra."""
    home = tmp_path_factory.mktemp("installed") / "venv"
    venv.create(home, symlinks=True)
    python = home / "bin" / "python"
    command = [sys.executable, "-m", "pip", "--python", str(python), "--disable-pip-version-check", "install", "--quiet", "--no-deps"]
    subprocess.run([*command, "--no-index", str(wheel)], check=True, capture_output=True)
    packages = Path(
        subprocess.run(
            [python, "-c", "import site; print(site.getsitepackages()[0])"], capture_output=True, text=True, check=True
        ).stdout.strip()
    )
    (package,) = packages.glob("cute_mla-*.dist-info")
    requires = [Requirement(line[15:]) for line in (package / "METADATA").read_text().splitlines() if line.startswith("Requires-Dist: ")]
    seen: set[str] = set()
    for requirement in requires:
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            for name in needed(requirement.name, seen):
                link(name, packages)
    return home


def link(name: str, packages: Path) -> None:
    """Link what a distribution has at the top of its folder."""
    found = distribution(name)
    for top in {file.parts[0] for file in found.files or () if file.parts[0] not in ("..", "__pycache__")}:
        if not (packages / top).exists():
            (packages / top).symlink_to(Path(str(found.locate_file(top))).resolve())


def run(installed: Path, folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """Run a program of the environment in an empty folder, with nothing else on any path."""
    folder.mkdir(exist_ok=True)
    environment = {"PATH": f"{installed / 'bin'}:/usr/bin:/bin", "HOME": str(folder)}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=600)


def test_installed_it_proves_itself(installed: Path, wheel: Path, tmp_path: Path) -> None:
    where = "import cute_mla, importlib.util as u; print(cute_mla.__file__, u.find_spec('cutlass'))"
    found = run(installed, tmp_path / "empty", "python", "-c", where)
    assert found.stdout.split() == [str(next(installed.glob("lib/*/site-packages/cute_mla/__init__.py"))), "None"], found.stderr
    commit = unpack(wheel, tmp_path / "unpacked").provenance.commit

    cases = [planned.case for planned in suite("smoke", "dense_decode", simulated=True, seed=0) if planned.mode == "whole"]
    smallest = min((case for case in cases if case.tiles), key=lambda case: case.tiles)
    verify = ("cute-mla", "verify", "--op", "dense_decode", "--arch", "sm90", "--schedules", "1", "--replay", smallest.id)
    proof = run(installed, tmp_path / "empty", *verify)
    assert proof.returncode == 0, proof.stdout + proof.stderr
    assert proof.stdout.splitlines()[-1].startswith("PASSED: 1 case agrees with the fp64 reference; sm90 on the simulated device")
    assert f"from commit {commit}: the sha256 of every file is the manifest's" in proof.stdout.splitlines()[0]
    environment = json.loads(run(installed, tmp_path / "empty", "cute-mla", "show", "env", "--json").stdout)
    assert environment["artifacts"]["provenance"]["source"] == f"commit {commit}"
    assert environment["artifacts"]["damaged"] == []

    artifacts = next(installed.glob("lib/*/site-packages/cute_mla/artifacts"))
    damaged = ("merge_states_sm100_fp16_d128.ptx", "merge_states_sm100_fp16_d128.cubin")  # which the case does not need
    for name in damaged:
        whole = (artifacts / name).read_bytes()
        (artifacts / name).write_bytes(whole[:-9] + bytes([whole[-9] ^ 1]) + whole[-8:])
    refused = run(installed, tmp_path / "empty", *verify)
    assert refused.returncode == 1
    assert refused.stdout.splitlines()[-1].startswith("FAILED: 0 of 1 case, 2 damaged artefacts")
    for name in damaged:
        assert f"{name} is damaged: sha256" in refused.stderr


@pytest.fixture
def shipped(wheel: Path, tmp_path: Path) -> Shipped:
    """Return the wheel, unpacked."""
    return unpack(wheel, tmp_path / "unpacked")


def test_what_cannot_be_rebuilt_is_said_at_once(shipped: Shipped, checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ToolError, match="has no kernel combine"):
        rebuild(shipped, ["combine"], checkout, tmp_path / "work")
    monkeypatch.setattr(rebuilding, "tool_versions", lambda: {"nvidia-cutlass-dsl": "9.9"})
    with pytest.raises(ToolError, match=rf"{SMALL} was built with nvidia-cutlass-dsl 4\.\d+\.\d+; here is 9\.9"):
        rebuild(shipped, [SMALL], checkout, tmp_path / "work")
    bare = tmp_path / "bare.whl"
    with zipfile.ZipFile(bare, "w") as archive:
        archive.writestr("cute_mla/artifacts/manifest.json", "{}")
    with pytest.raises(ToolError, match="has no provenance"):
        unpack(bare, tmp_path / "other")


@pytest.mark.slow
def test_its_commit_gives_the_same_bytes_and_other_bytes_are_found(shipped: Shipped, checkout: Path, tmp_path: Path) -> None:
    """Needs kernels that were built of the sources as they are."""
    assert rebuild(shipped, [SMALL], checkout, tmp_path / "work", jobs=1) == []
    ptx = shipped.folder / f"{SMALL}.ptx"
    ptx.write_text(ptx.read_text() + "// another\n")
    assert rebuild(shipped, [SMALL], checkout, tmp_path / "again", jobs=1) == [f"{SMALL}.ptx differs"]


@pytest.mark.slow
def test_a_wheel_that_holds_more_than_its_commit_is_found(shipped: Shipped, checkout: Path, tmp_path: Path) -> None:
    other = tmp_path / shipped.wheel.name
    shutil.copyfile(shipped.wheel, other)
    with zipfile.ZipFile(other, "a") as archive:
        archive.writestr("cute_mla/more.py", "")
    found = rebuild(Shipped(other, shipped.folder, shipped.manifest, shipped.provenance), [SMALL], checkout, tmp_path / "work", jobs=1)
    assert found == ["cute_mla/more.py differs in the wheel"]
    assert Provenance.load(shipped.folder) == shipped.provenance
