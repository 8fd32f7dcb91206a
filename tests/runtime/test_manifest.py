"""The manifest survives a round trip, says what is wrong with a damaged one, and never reads half a file."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cute_mla.manifest import (
    MANIFEST_NAME,
    PROVENANCE_NAME,
    Barrier,
    Manifest,
    ManifestError,
    NamedBarrier,
    Provenance,
    Role,
    manifest_sha256,
)
from tests.support.kernel_entries import kernel_entry
from tests.support.params import float32s, int32s, int64s, pointers, tensor_maps

NAME = "dense_decode_sm90_bf16_cluster2"
ENTRY = kernel_entry(
    "dense_decode",
    "sm90",
    "bf16_cluster2",
    config={"dtype": "bf16", "cluster": 2},
    params=(*tensor_maps("kv_map"), *pointers("q"), *int64s("stride"), *float32s("scale"), *int32s("s_q")),
    block=(384, 1, 1),
    cluster=(2, 1, 1),
    smem_bytes=232_448,
    barriers=(Barrier("kv_ready", 0, 2), Barrier("kv_free", 16, 2)),
    named_barriers=(NamedBarrier("scores", 1),),
    roles=(Role("load", 0, 4), Role("math", 4, 8)),
    instructions={"HGMMA": 44, "UTMALDG": 9},
    tools={"nvidia-cutlass-dsl": "4.8.1"},
)


def save(folder: Path) -> dict[str, Any]:
    """Save the sample and return its JSON."""
    Manifest({NAME: ENTRY}).save(folder)
    loaded: dict[str, Any] = json.loads((folder / MANIFEST_NAME).read_text())
    return loaded


def test_round_trip_keeps_every_field(tmp_path: Path) -> None:
    save(tmp_path)
    assert Manifest.load(tmp_path) == Manifest({NAME: ENTRY})


def test_equal_manifests_give_equal_bytes(tmp_path: Path) -> None:
    other = replace(ENTRY, name="dense_decode_sm90_a", instructions=dict(reversed(ENTRY.instructions.items())))
    Manifest({NAME: ENTRY, other.name: other}).save(tmp_path / "one")
    Manifest({other.name: replace(other, instructions=ENTRY.instructions), NAME: ENTRY}).save(tmp_path / "two")
    assert (tmp_path / "one" / MANIFEST_NAME).read_bytes() == (tmp_path / "two" / MANIFEST_NAME).read_bytes()


@pytest.mark.parametrize(
    ("path", "value", "expected"),
    [
        (("format",), 99, "format: found 99, expected 2"),
        (("extra",), 1, r"the file: found \['extra', 'format', 'kernels'\], expected exactly"),
        (("kernels",), [], r"kernels: found \[\], expected an object"),
        (("kernels", NAME, "cubin_sha256"), "xyz", f"kernels.{NAME}.cubin_sha256: found 'xyz', expected 64 hexadecimal digits"),
        (("kernels", NAME, "ptx"), "../k.ptx", "found '../k.ptx', expected the name of a file beside the manifest"),
        (("kernels", NAME, "arch"), "sm70", "arch: found 'sm70', expected one of sm90"),
        (("kernels", NAME, "block"), [384, 1], r"block: found \[384, 1\], expected a list of three integers"),
        (("kernels", NAME, "block"), [384, 0, 1], r"block\[1\]: found 0, expected an integer >= 1"),
        (("kernels", NAME, "registers"), True, "registers: found True, expected an integer >= 1"),
        (("kernels", NAME, "smem_bytes"), "1024", "smem_bytes: found '1024', expected an integer >= 0"),
        (("kernels", NAME, "params", 0, "kind"), "float64", r"params\[0\].kind: found 'float64', expected one of pointer"),
        (("kernels", NAME, "unknown"), 1, "expected exactly the fields"),
        (("kernels", NAME, "name"), "other", "expected its key"),
        (("kernels", NAME, "op"), "combine", "expected its key dense_decode_sm90_bf16_cluster2, beginning with its op and arch"),
        (("kernels", NAME, "instructions", "HGMMA"), -1, "instructions.HGMMA: found -1"),
        (("kernels", NAME, "barriers", 0, "offset"), 4, "8-byte aligned words inside 232448 bytes"),
        (("kernels", NAME, "barriers", 1, "offset"), 232_440, "8-byte aligned words inside 232448 bytes"),
        (("kernels", NAME, "roles", 1, "warps"), 9, "warps among the 12 of a block"),
        (("kernels", NAME, "smem_bytes"), 1 << 31, "smem_bytes: found 2147483648, expected an integer >= 0 of 32 bits"),
        (("kernels", NAME, "block"), [1 << 200, 1, 1], r"block\[0\]: found 1606938044258990275\d+.*, expected an integer >= 1 of 32 bits"),
        (("kernels", NAME, "registers"), float("nan"), "registers: found nan, expected an integer"),
        (("kernels", NAME, "config", "dtype"), [[]], r"config.dtype: found \[\[\]\], expected a string"),
        (("kernels", NAME, "arch"), ["sm90"], r"arch: found \['sm90'\], expected one of sm90"),
        (("kernels", NAME, "entry"), "a\0b", "entry: found .*, expected the name of an entry"),
        (("kernels", NAME, "tools", "\ud800"), "1", "tools: found .*, expected a non-empty string of printable characters"),
    ],
)
def test_a_damaged_field_is_named_with_what_was_found_and_expected(
    tmp_path: Path, path: tuple[str | int, ...], value: object, expected: str
) -> None:
    raw = save(tmp_path)
    place: Any = raw
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    (tmp_path / MANIFEST_NAME).write_text(json.dumps(raw))
    with pytest.raises(ManifestError, match=expected) as failure:
        Manifest.load(tmp_path)
    assert str(tmp_path / MANIFEST_NAME) in str(failure.value)


def test_a_missing_field_is_named(tmp_path: Path) -> None:
    raw = save(tmp_path)
    del raw["kernels"][NAME]["entry"]
    (tmp_path / MANIFEST_NAME).write_text(json.dumps(raw))
    with pytest.raises(ManifestError, match="expected exactly the fields"):
        Manifest.load(tmp_path)


DEEP = b"[" * 100_000 + b"]" * 100_000
HUGE = b'{"format": ' + b"9" * 5_000 + b', "kernels": {}}'


@pytest.mark.parametrize(
    "content", [b"", b"{", b"\xff\xfe", b"[]", b"null", DEEP, HUGE], ids=lambda content: content[:12].decode("latin-1")
)
def test_a_file_that_is_not_a_json_object_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / MANIFEST_NAME).write_bytes(content)
    with pytest.raises(ManifestError, match=r"manifest\.json: .*found"):
        Manifest.load(tmp_path)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes")
@pytest.mark.parametrize("name", [MANIFEST_NAME, PROVENANCE_NAME])
@pytest.mark.parametrize("kind", ["pipe", "folder", "device"])
def test_a_file_that_is_no_regular_file_is_refused_and_not_waited_for(tmp_path: Path, name: str, kind: str) -> None:
    if kind == "pipe":
        os.mkfifo(tmp_path / name)
    elif kind == "folder":
        (tmp_path / name).mkdir()
    else:
        (tmp_path / name).symlink_to("/dev/zero")
    with pytest.raises(ManifestError, match=rf"{name}: found unreadable content \(.*Not a regular file"):
        (Manifest if name == MANIFEST_NAME else Provenance).load(tmp_path)


def test_a_missing_file_names_the_command(tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match="found no such file, expected the manifest that `cute-mla build` writes"):
        Manifest.load(tmp_path)


def test_a_save_that_fails_leaves_the_old_file_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path)
    before = (tmp_path / MANIFEST_NAME).read_bytes()

    def full_disk(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(OSError, match="No space left"):
        Manifest({}).save(tmp_path)
    assert (tmp_path / MANIFEST_NAME).read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == [MANIFEST_NAME]


PROVENANCE = Provenance("0.1.0", "d" * 40, True, {"python": "3.11.4"}, "e" * 64)


def test_provenance_survives_a_round_trip(tmp_path: Path) -> None:
    assert Provenance.load(tmp_path) is None
    PROVENANCE.save(tmp_path)
    assert Provenance.load(tmp_path) == PROVENANCE
    assert PROVENANCE.source == f"commit {'d' * 40}"
    assert replace(PROVENANCE, clean=False).source == f"commit {'d' * 40} with local changes"


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("format", 0, "format: found 0, expected 2"),
        ("commit", "main", "provenance.commit: found 'main', expected the name of a commit"),
        ("clean", 1, "provenance.clean: found 1, expected true or false"),
        ("signed", "by me", "provenance: .* expected exactly the fields"),
        ("clean", False, "provenance.sha256: found '[0-9a-f]{64}', expected [0-9a-f]{64}, that of the other fields"),
        ("version", "0.1.1", "provenance.sha256: found"),
        ("sha256", None, "provenance.sha256: found None"),
    ],
)
def test_damaged_provenance_is_refused(tmp_path: Path, field: str, value: object, expected: str) -> None:
    PROVENANCE.save(tmp_path)
    raw = json.loads((tmp_path / PROVENANCE_NAME).read_text())
    (tmp_path / PROVENANCE_NAME).write_text(json.dumps({**raw, field: value}))
    with pytest.raises(ManifestError, match=rf"provenance\.json: {expected}"):
        Provenance.load(tmp_path)


def test_the_manifests_own_hash_is_of_the_file(tmp_path: Path) -> None:
    assert manifest_sha256(tmp_path) is None
    (tmp_path / MANIFEST_NAME).write_bytes(b"{}")
    assert manifest_sha256(tmp_path) == hashlib.sha256(b"{}").hexdigest()
