"""Artefacts on disk: found, checked, and refused with one clear message each."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from cute_mla.manifest import MANIFEST_NAME, PROVENANCE_NAME, Provenance, manifest_sha256
from cute_mla.runtime import artifacts
from cute_mla.runtime.artifacts import cubin_sm, cubin_toolkit, load_artifacts
from cute_mla.runtime.errors import ArtifactError
from cute_mla.spec.arch import SM100
from tests.runtime.fake_artifacts import dense_entries, fake_cubin, write_artifacts

NAME = "dense_decode_sm90_bf16_cluster1"


def test_default_folder_is_inside_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(artifacts.FOLDER_VARIABLE, raising=False)
    assert artifacts.artifacts_folder() == Path(artifacts.__file__).parent.parent / "artifacts"


def test_folder_from_the_environment(artifacts: Path) -> None:
    assert load_artifacts().folder == artifacts


def test_reads_what_the_manifest_describes(artifacts: Path) -> None:
    loaded = load_artifacts()
    entry = loaded.entry("dense_decode", "sm90", "bf16_cluster1")
    assert entry.name == NAME
    assert loaded.cubin(entry) == fake_cubin()
    assert loaded.ptx(entry) == "// not PTX\n"


def test_loaded_once_and_again_after_a_build(artifacts: Path) -> None:
    first = load_artifacts()
    assert load_artifacts() is first
    write_artifacts(artifacts)
    stamp = (artifacts / MANIFEST_NAME).stat().st_mtime_ns + 1_000_000
    os.utime(artifacts / MANIFEST_NAME, ns=(stamp, stamp))
    assert load_artifacts() is not first


def test_no_manifest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ArtifactError, match=r"no manifest\.json in .*: build the kernels with `make quick` \(.*\) or `make build`"):
        load_artifacts(tmp_path)
    monkeypatch.setattr(artifacts, "_TREE", tmp_path)  # as in an installation
    with pytest.raises(ArtifactError, match=r"no manifest\.json in .*: build the kernels with `cute-mla build`"):
        load_artifacts(tmp_path)


@pytest.mark.parametrize("content", ["{", "[]", '{"format": 999, "kernels": {}}'], ids=["not JSON", "not an object", "other format"])
def test_damaged_manifest(tmp_path: Path, content: str) -> None:
    (tmp_path / MANIFEST_NAME).write_text(content)
    with pytest.raises(ArtifactError, match=r"manifest\.json.*found.*expected.*build the kernels again"):
        load_artifacts(tmp_path)


def test_truncated_entry_in_manifest(artifacts: Path) -> None:
    path = artifacts / MANIFEST_NAME
    raw = json.loads(path.read_text())
    del raw["kernels"][NAME]["cubin_sha256"]
    path.write_text(json.dumps(raw))
    with pytest.raises(ArtifactError, match=NAME):
        load_artifacts()


@pytest.mark.parametrize("kind", ["cubin", "ptx"])
def test_one_flipped_bit(artifacts: Path, kind: str) -> None:
    path = artifacts / f"{NAME}.{kind}"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    loaded = load_artifacts()
    entry = loaded.entry("dense_decode", "sm90", "bf16_cluster1")
    with pytest.raises(ArtifactError, match=rf"{NAME}\.{kind} is damaged: sha256 .* the manifest says {getattr(entry, f'{kind}_sha256')}"):
        getattr(loaded, kind)(entry)


def test_a_check_reads_every_file_and_names_each_that_is_not_as_it_should_be(artifacts: Path) -> None:
    assert load_artifacts().damages() == []
    (artifacts / f"{NAME}.cubin").unlink()
    (artifacts / "combine_sm100_bf16.ptx").write_text("// another\n")
    loaded = load_artifacts()
    assert [damage.split(":")[0] for damage in loaded.damages()] == [
        f"{artifacts / 'combine_sm100_bf16.ptx'} is damaged",
        f"cannot read {artifacts / NAME}.cubin",
    ]


def test_a_wheels_manifest_is_the_one_that_its_provenance_names(artifacts: Path) -> None:
    sha256 = manifest_sha256(artifacts)
    assert sha256 is not None
    Provenance("0.1.0", "a" * 40, True, {}, sha256).save(artifacts)
    stamp = (artifacts / MANIFEST_NAME).stat().st_mtime_ns + 1_000_000
    os.utime(artifacts / MANIFEST_NAME, ns=(stamp, stamp))
    loaded = load_artifacts()
    assert loaded.provenance is not None
    assert loaded.damages() == []
    with (artifacts / MANIFEST_NAME).open("a") as manifest:
        manifest.write("\n")
    (damage,) = load_artifacts().damages()
    assert re.search(r"manifest\.json is not the one of .*provenance\.json", damage)


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the artefacts of an installed wheel: files beside the list of its files, on the import path."""
    folder = tmp_path / "site" / "cute_mla" / "artifacts"
    write_artifacts(folder)
    sha256 = manifest_sha256(folder)
    assert sha256 is not None
    Provenance("0.1.0", "a" * 40, True, {}, sha256).save(folder)
    about = tmp_path / "site" / "cute_mla-0.1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: cute-mla\nVersion: 0.1.0\n")
    names = [path.relative_to(tmp_path / "site") for path in sorted(folder.iterdir())]
    (about / "RECORD").write_text("".join(f"{name},,\n" for name in names))
    monkeypatch.syspath_prepend(tmp_path / "site")
    return folder


def test_a_wheels_kernels_are_not_used_without_their_provenance(installed: Path, tmp_path: Path) -> None:
    assert load_artifacts(installed).provenance is not None
    (installed / PROVENANCE_NAME).unlink()
    (installed / MANIFEST_NAME).touch()
    os.utime(installed / MANIFEST_NAME, ns=(1, 1))
    with pytest.raises(ArtifactError, match=r"provenance\.json: found no such file, expected the one that was installed with the kernels"):
        load_artifacts(installed)
    elsewhere = tmp_path / "tree"
    write_artifacts(elsewhere)
    assert load_artifacts(elsewhere).provenance is None


def params_changed(kind: str, params: list[dict[str, str]]) -> list[dict[str, str]]:
    """Return a manifest's parameters with one more, one less, two in another order, or one of another kind."""
    if kind == "less":
        return params[:-1]
    if kind == "more":
        return [*params, {"name": "another", "kind": "int32"}]
    if kind == "order":
        return [params[0], params[2], params[1], *params[3:]]
    return [*params[:-1], {**params[-1], "kind": "float32"}]


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("less", r"\d+ parameters, expected \d+"),
        ("more", r"\d+ parameters, expected \d+"),
        ("order", r"\[1\] pointer"),
        ("kind", r"\[\d+\] float32 steady_values, expected int32 steady_values"),
    ],
)
def test_parameters_that_the_launches_do_not_pass(artifacts: Path, kind: str, said: str) -> None:
    path = artifacts / MANIFEST_NAME
    raw = json.loads(path.read_text())
    entry = raw["kernels"][NAME]
    entry["params"] = params_changed(kind, entry["params"])
    path.write_text(json.dumps(raw))
    with pytest.raises(ArtifactError, match=rf"manifest\.json: kernels\.{NAME}\.params: found {said}"):
        load_artifacts().entry("dense_decode", "sm90", "bf16_cluster1")
    assert [damage for damage in load_artifacts().damages() if f"{NAME}.params" in damage]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes")
@pytest.mark.parametrize("kind", ["cubin", "ptx"])
def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(artifacts: Path, kind: str) -> None:
    path = artifacts / f"{NAME}.{kind}"
    path.unlink()
    os.mkfifo(path)
    loaded = load_artifacts()
    with pytest.raises(ArtifactError, match=rf"cannot read .*{NAME}\.{kind}: Not a regular file"):
        getattr(loaded, kind)(loaded.entry("dense_decode", "sm90", "bf16_cluster1"))


def test_missing_cubin(artifacts: Path) -> None:
    (artifacts / f"{NAME}.cubin").unlink()
    loaded = load_artifacts()
    with pytest.raises(ArtifactError, match=rf"cannot read .*{NAME}\.cubin: No such file"):
        loaded.cubin(loaded.entry("dense_decode", "sm90", "bf16_cluster1"))


@pytest.mark.parametrize(
    ("cubin", "said"),
    [(fake_cubin(sm=100), "is a cubin for sm_100"), (b"\0" * 100, "is not a cubin")],
    ids=["sm_100", "zeros"],
)
def test_cubin_of_another_architecture(artifacts: Path, cubin: bytes, said: str) -> None:
    write_artifacts(artifacts, cubin)
    loaded = load_artifacts()
    with pytest.raises(ArtifactError, match=f"{said}; the manifest says sm_90a"):
        loaded.cubin(loaded.entry("dense_decode", "sm90", "bf16_cluster1"))


def test_each_architecture_has_its_own(artifacts: Path) -> None:
    loaded = load_artifacts()
    entries = {arch: loaded.entry("dense_decode", arch, "bf16_cluster2") for arch in ("sm90", "sm100")}
    assert {arch: cubin_sm(loaded.cubin(entry)) for arch, entry in entries.items()} == {"sm90": 90, "sm100": 100}


def test_a_cubin_for_sm90_in_the_place_of_one_for_sm100(artifacts: Path) -> None:
    write_artifacts(artifacts, fake_cubin(90), dense_entries(fake_cubin(90), SM100))
    loaded = load_artifacts()
    with pytest.raises(ArtifactError, match="is a cubin for sm_90; the manifest says sm_100f"):
        loaded.cubin(loaded.entry("combine", "sm100", "bf16"))


def test_no_such_kernel(artifacts: Path) -> None:
    built = len(load_artifacts().manifest.kernels)
    message = (
        f"found no kernel dense_decode_sm90_fp8 among the {built} that are built; nearest: dense_decode_.*; "
        "build it with `cute-mla build --kernel dense_decode_sm90_fp8`, or install the wheel again"
    )
    with pytest.raises(ArtifactError, match=message):
        load_artifacts().entry("dense_decode", "sm90", "fp8")


@pytest.mark.parametrize(("abi", "sm"), [(7, 90), (8, 90), (8, 100)])
def test_sm_of_both_elf_forms(abi: int, sm: int) -> None:
    assert cubin_sm(fake_cubin(sm=sm, abi=abi)) == sm


def test_toolkit_of_a_cubin() -> None:
    assert cubin_toolkit(fake_cubin(toolkit="13.4")) == (13, 4)
    assert cubin_toolkit(fake_cubin(toolkit="")) is None
