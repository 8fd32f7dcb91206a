"""Disassemblies on disk: kept, made again when damaged, bounded, private, and never in the way."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cute_mla.runtime.artifacts import artifacts_folder
from cute_mla.simulator.findings import SassError
from cute_mla.simulator.sass import disassembler, text_cache
from cute_mla.simulator.sass.text_cache import TextCache, cache_folder, disassembly

TEXT = "EXIT ;\n" * 1000


def refuse() -> str:
    pytest.fail("the text was made again")


def only_file(folder: Path) -> Path:
    (path,) = folder.iterdir()
    return path


def test_a_text_is_kept_and_read_by_others(tmp_path: Path) -> None:
    cache = TextCache(tmp_path / "a" / "b")
    assert cache.get("key", lambda: TEXT) == TEXT
    assert TextCache(tmp_path / "a" / "b").get("key", refuse) == TEXT
    assert cache.get("other", lambda: "") == ""
    assert cache.get("other", refuse) == ""


def test_only_the_owner_may_look(tmp_path: Path) -> None:
    cache = TextCache(tmp_path / "cache")
    cache.get("key", lambda: TEXT)
    assert cache.folder.stat().st_mode & 0o777 == 0o700
    assert only_file(cache.folder).stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(("flipped", "length"), [*((place, None) for place in (0, 31, 32, -1)), *((None, n) for n in (0, 5, 32, 40))])
def test_a_damaged_file_is_made_again(tmp_path: Path, flipped: int | None, length: int | None) -> None:
    """A bit flipped, or the end cut off."""
    cache = TextCache(tmp_path)
    cache.get("key", lambda: TEXT)
    path = only_file(tmp_path)
    content = bytearray(path.read_bytes()[:length])
    if flipped is not None:
        content[flipped] ^= 1
    path.write_bytes(content)
    assert cache.get("key", lambda: "again") == "again"
    assert cache.get("key", refuse) == "again"


def test_the_files_used_longest_ago_go_first(tmp_path: Path) -> None:
    cache = TextCache(tmp_path)
    for key in ("first", "second", "third"):
        cache.get(key, lambda: TEXT)
    for age, key in enumerate(("second", "first", "third")):
        os.utime(tmp_path / f"{key}.sass", (1000 + age, 1000 + age))
    size = (tmp_path / "first.sass").stat().st_size
    (tmp_path / "left.tmp").write_bytes(bytes(size))
    os.utime(tmp_path / "left.tmp", (1, 1))
    TextCache(tmp_path, 3 * size).get("fourth", lambda: TEXT)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["first.sass", "fourth.sass", "third.sass"]


@pytest.mark.parametrize("kind", ["a file", "a link", "writable by others"])
def test_a_folder_that_is_not_private_is_not_used(tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "cache"
    if kind == "a file":
        folder.write_text("")
    elif kind == "a link":
        (tmp_path / "elsewhere").mkdir()
        folder.symlink_to(tmp_path / "elsewhere")
    else:
        folder.mkdir()
        folder.chmod(0o777)
    for text in ("one", "two"):
        assert TextCache(folder).get("key", lambda text=text: text) == text  # type: ignore[misc]
    assert kind == "a file" or not list(folder.iterdir())


def test_an_error_is_not_kept(tmp_path: Path) -> None:
    def fail() -> str:
        raise SassError("no cubin")

    with pytest.raises(SassError, match="no cubin"):
        TextCache(tmp_path).get("key", fail)
    assert not list(tmp_path.iterdir())


def test_the_folder_is_the_users(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "cute-mla" / "disassembly"
    for other in ("", "relative"):
        monkeypatch.setenv("XDG_CACHE_HOME", other)
        assert cache_folder() == Path.home() / ".cache" / "cute-mla" / "disassembly"


def test_a_disassembly_is_made_once_for_a_cubin_and_a_release(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    made: list[bytes] = []

    def make(cubin: bytes) -> str:
        made.append(cubin)
        return TEXT

    monkeypatch.setattr(text_cache, "disassemble", make)
    for cubin in (b"one", b"two", b"one"):
        assert disassembly(cubin) == TEXT
    assert made == [b"one", b"two"]
    monkeypatch.setattr(text_cache, "version", lambda package: "99.0")
    disassembly(b"one")
    assert made == [b"one", b"two", b"one"]


def test_the_text_is_the_disassemblers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cubin = (artifacts_folder() / "merge_states_sm90_bf16_d128.cubin").read_bytes()
    text = disassembly(cubin)
    assert text == disassembler.disassemble(cubin)
    monkeypatch.setattr(text_cache, "disassemble", lambda cubin: pytest.fail("nvdisasm ran again"))
    assert disassembly(cubin) == text
