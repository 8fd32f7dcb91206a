"""CI refuses unfinished commits, long subjects and binary files."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.tree import ROOT


def commits(folder: Path, subject: str, content: bytes) -> subprocess.CompletedProcess[str]:
    """Run the check of CI in a new repository with one commit."""
    (folder / ".ci").mkdir()
    shutil.copy(ROOT / ".ci" / "commits", folder / ".ci")
    (folder / "file").write_bytes(content)
    identity = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
    for arguments in (("init", "-q"), ("add", "."), (*identity, "commit", "-q", "-m", subject)):
        subprocess.run(["git", *arguments], cwd=folder, check=True)
    return subprocess.run([folder / ".ci" / "commits"], capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("subject", "content", "message"),
    [
        ("area: " + 66 * "x", b"text\n", ""),
        ("area: " + 67 * "x", b"text\n", "at most 72 characters, got 73: area: x"),
        ("WIP: goldens", b"text\n", "got 12: WIP: goldens"),
        ("area: add a kernel", b"\x7fELF\0\0", "file: binary files are built or fetched"),
    ],
)
def test_commits_are_refused(subject: str, content: bytes, message: str, tmp_path: Path) -> None:
    result = commits(tmp_path, subject, content)
    assert (result.returncode, message in result.stdout, result.stderr) == (int(bool(message)), True, "")
    assert message or not result.stdout
