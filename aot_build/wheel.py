"""Packing of a built tree into one wheel for every platform, with the provenance of its kernels.

    python -m cute_mla.aot_build.wheel [--artifacts FOLDER] [--out FOLDER]

The same commit, artefacts and tools give the same bytes: time stamps are the commit's, permissions are fixed, and the wheel holds
only files that git knows and files that the manifest names.
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

from cute_mla.manifest import Manifest, ManifestError, Provenance, manifest_sha256, read_verified
from cute_mla.spec.arch import ARCHS

from .fingerprint import PACKAGE, fingerprint
from .tools import ToolError, package_version
from .variants import closed_variants

TREE = Path(__file__).absolute().parent.parent.parent

_MOST_NAMED = 5  # kernels named in a message
_UMASK = 0o022  # fixed, because the wheel records the modes of files that the packer writes


def make_wheel(tree: Path, artifacts: Path, out: Path) -> Path:
    """Pack a checkout with these artefacts, and return the wheel in the folder `out`.

    Untracked files that git does not ignore are packed as well; the provenance then records local changes.
    ToolError if git or pip fails; ManifestError without artefacts, or if a file is not the one that the manifest describes.
    """
    with tempfile.TemporaryDirectory() as folder:
        staged, made = Path(folder) / "tree", Path(folder) / "wheel"
        stage(tree, staged)
        commit = place_artifacts(tree, artifacts, staged / PACKAGE / "artifacts").commit
        options = ("--quiet", "--disable-pip-version-check", "--no-deps", "--no-build-isolation", "--no-cache-dir")
        epoch = f"SOURCE_DATE_EPOCH={git(tree, 'show', '-s', '--format=%ct', commit).strip()}"
        _run(["env", epoch, sys.executable, "-m", "pip", "wheel", *options, "--wheel-dir", str(made), str(staged)])
        (wheel,) = made.glob("*.whl")
        out.mkdir(parents=True, exist_ok=True)
        return Path(shutil.move(wheel, out / wheel.name))


def place_artifacts(tree: Path, artifacts: Path, target: Path) -> Provenance:
    """Make the folder `target` with these artefacts and their provenance, and return the latter.

    ManifestError without artefacts, or if a file is not the one that the manifest describes.
    """
    manifest = Manifest.load(artifacts)
    target.mkdir()
    for entry in manifest.kernels.values():
        for name, sha256 in ((entry.cubin, entry.cubin_sha256), (entry.ptx, entry.ptx_sha256)):
            (target / name).write_bytes(read_verified(artifacts / name, sha256))
            (target / name).chmod(0o644)
    manifest.save(target)
    provenance = _provenance(tree, git(tree, "rev-parse", "HEAD").strip(), target)
    provenance.save(target)
    return provenance


def check_current(artifacts: Path) -> None:
    """Raise ToolError if kernels are missing, or were not built from these sources."""
    stale = stale_kernels(Manifest.load(artifacts))
    if stale:
        names = ", ".join(stale[:_MOST_NAMED]) + (", ..." if len(stale) > _MOST_NAMED else "")
        raise ToolError(f"{len(stale)} kernels were not built from these sources: {names}; run `cute-mla build`")


def stale_kernels(manifest: Manifest) -> list[str]:
    """Return the kernels of the closed list that are missing or built from other sources, and kernels that are not on the list."""
    variants = {variant.name: variant for arch in ARCHS.values() for variant in closed_variants(arch)}
    stale = []
    for name, variant in variants.items():
        entry = manifest.kernels.get(name)
        if entry is None or entry.fingerprint != fingerprint(variant):
            stale.append(name)
    return sorted([*stale, *(manifest.kernels.keys() - variants.keys())])


def git(tree: Path, *arguments: str) -> str:
    """Return the output of a git command. ToolError with git's message if it fails."""
    return _run(["git", "-C", str(tree), *arguments])


def is_clean(tree: Path) -> bool:
    """Return whether a checkout has exactly the files of its commit, ignored files aside."""
    return not git(tree, "status", "--porcelain").strip()


def stage(tree: Path, staged: Path) -> None:
    """Copy the files of a checkout that git knows or would add. Links stay links; modes are 755 or 644."""
    for name in filter(None, git(tree, "ls-files", "-z", "--cached", "--others", "--exclude-standard").split("\0")):
        source, target = tree / name, staged / name
        if not os.path.lexists(source):
            continue  # deleted without a commit
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target, follow_symlinks=False)
        if not target.is_symlink():
            target.chmod(0o755 if source.stat().st_mode & stat.S_IXUSR else 0o644)


def _provenance(tree: Path, commit: str, artifacts: Path) -> Provenance:
    sha256 = manifest_sha256(artifacts)
    assert sha256 is not None  # make_wheel has written the manifest
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


def packing_options(description: str, out: Path, arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the options of a command that packs kernels. out: the default of --out."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--artifacts", type=Path, default=TREE / PACKAGE / "artifacts", help="folder of the built kernels")
    parser.add_argument("--out", type=Path, default=out, help="folder for what is made")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. Return 0 if the wheel was made, else 1."""
    options = packing_options("Pack this tree, with its built kernels, into a wheel.", TREE / "dist", arguments)
    try:
        check_current(options.artifacts)
        wheel = make_wheel(TREE, options.artifacts, options.out)
    except (ToolError, ManifestError) as error:
        print(error, file=sys.stderr)
        return 1
    content = wheel.read_bytes()
    print(f"{wheel}: {len(content) / 1e6:.1f} MB, sha256 {hashlib.sha256(content).hexdigest()}")
    if not is_clean(TREE):
        print("the tree has local changes: no commit reproduces this wheel")
    return 0


if __name__ == "__main__":
    sys.exit(main())
