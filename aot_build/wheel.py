"""Packs a built tree into one wheel for every platform, with the record of where its kernels come from.

Run as `python -m cute_mla.aot_build.wheel [--artifacts FOLDER] [--out FOLDER]`. The same commit, artefacts and tools give the same bytes:
times are the commit's, permissions are set, and nothing goes in but the files that git knows and those that the manifest names.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import platform
import re
import shutil
import stat
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from pathlib import Path

from cute_mla.manifest import Manifest, ManifestError, Provenance, manifest_sha256
from cute_mla.spec.arch import ARCHS

from .fingerprint import PACKAGE, fingerprint
from .tools import ToolError, package_version
from .variants import closed_variants

TREE = Path(__file__).absolute().parent.parent.parent

_SHOWN = 5  # kernels in a message
_UMASK = 0o022  # the modes of files that the packer writes are in the wheel


def make_wheel(tree: Path, artifacts: Path, out: Path) -> Path:
    """The wheel of a checkout with these artefacts, in the folder out. ToolError if git or pip fails, ManifestError without artefacts.

    What git does not know, and does not ignore, goes in as well; the provenance then says that there were local changes.
    """
    commit = git(tree, "rev-parse", "HEAD").strip()
    manifest = Manifest.load(artifacts)
    with tempfile.TemporaryDirectory() as folder:
        staged, made = Path(folder) / "tree", Path(folder) / "wheel"
        stage(tree, staged)
        target = staged / PACKAGE / "artifacts"
        target.mkdir()
        for name in sorted({name for entry in manifest.kernels.values() for name in (entry.cubin, entry.ptx)}):
            shutil.copyfile(artifacts / name, target / name)
            (target / name).chmod(0o644)
        manifest.save(target)
        _provenance(tree, commit, target).save(target)
        options = ("--quiet", "--disable-pip-version-check", "--no-deps", "--no-build-isolation", "--no-cache-dir")
        epoch = f"SOURCE_DATE_EPOCH={git(tree, 'show', '-s', '--format=%ct', commit).strip()}"
        _run(["env", epoch, sys.executable, "-m", "pip", "wheel", *options, "--wheel-dir", str(made), str(staged)])
        (wheel,) = made.glob("*.whl")
        out.mkdir(parents=True, exist_ok=True)
        return Path(shutil.move(wheel, out / wheel.name))


def not_of_these_sources(manifest: Manifest) -> list[str]:
    """Kernels of the closed list that are missing or were built of other sources, and those that are not on the list."""
    variants = {variant.name: variant for arch in ARCHS.values() for variant in closed_variants(arch)}
    stale = []
    for name, variant in variants.items():
        entry = manifest.kernels.get(name)
        if entry is None or entry.fingerprint != fingerprint(variant):
            stale.append(name)
    return sorted([*stale, *(manifest.kernels.keys() - variants.keys())])


def git(tree: Path, *arguments: str) -> str:
    """What a git command prints. ToolError with git's words if it fails."""
    return _run(["git", "-C", str(tree), *arguments])


def is_clean(tree: Path) -> bool:
    """Whether a checkout has the files of its commit and no others but ignored ones."""
    return not git(tree, "status", "--porcelain").strip()


def stage(tree: Path, staged: Path) -> None:
    """Copies the files of a checkout that git knows or would add, with links as links and modes of their own."""
    for name in filter(None, git(tree, "ls-files", "-z", "--cached", "--others", "--exclude-standard").split("\0")):
        source, target = tree / name, staged / name
        if not os.path.lexists(source):
            continue  # deleted, and not committed yet
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target, follow_symlinks=False)
        if not target.is_symlink():
            target.chmod(0o755 if source.stat().st_mode & stat.S_IXUSR else 0o644)


def _provenance(tree: Path, commit: str, artifacts: Path) -> Provenance:
    sha256 = manifest_sha256(artifacts)
    assert sha256 is not None  # written before
    return Provenance(
        version=_version(tree),
        commit=commit,
        clean=is_clean(tree),
        tools={
            "python": platform.python_version(),
            "platform": sysconfig.get_platform(),
            **{package: package_version(package) for package in ("setuptools", "torch")},
        },
        manifest_sha256=sha256,
    )


def _version(tree: Path) -> str:
    """Return the version of a checkout, from the source that pip reads it from. ToolError if it is not there."""
    source = tree / PACKAGE / "__init__.py"
    found = re.search(r'^__version__ = "([^"]+)"$', source.read_text(), re.MULTILINE)
    if found is None:
        raise ToolError(f"{source} assigns no __version__")
    return found[1]


def _run(command: Sequence[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False, umask=_UMASK)
    if done.returncode:
        raise ToolError(f"{' '.join(command)} failed with exit code {done.returncode}: {done.stderr.strip()[-2000:]}")
    return done.stdout


def main(arguments: Sequence[str] | None = None) -> int:
    """The command: 0 if the wheel was made, else 1."""
    parser = argparse.ArgumentParser(description="Packs this tree, in which the kernels have been built, into a wheel.")
    parser.add_argument("--artifacts", type=Path, default=TREE / PACKAGE / "artifacts", help="folder of the kernels")
    parser.add_argument("--out", type=Path, default=TREE / "dist", help="folder of the wheel")
    options = parser.parse_args(arguments)
    try:
        stale = not_of_these_sources(Manifest.load(options.artifacts))
        if stale:
            shown = ", ".join(stale[:_SHOWN]) + (", ..." if len(stale) > _SHOWN else "")
            print(f"{len(stale)} kernels are not of these sources: {shown}; run `cute-mla build`", file=sys.stderr)
            return 1
        wheel = make_wheel(TREE, options.artifacts, options.out)
    except (ToolError, ManifestError) as error:
        print(error, file=sys.stderr)
        return 1
    content = wheel.read_bytes()
    print(f"{wheel}: {len(content) / 1e6:.1f} MB, sha256 {hashlib.sha256(content).hexdigest()}")
    if not is_clean(TREE):
        print("the tree has local changes: no commit gives this wheel again")
    return 0


if __name__ == "__main__":
    sys.exit(main())
