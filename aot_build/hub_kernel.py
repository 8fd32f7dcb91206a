"""Packing of a built tree into the folder of a Hugging Face kernel, which the package `kernels` loads.

    python -m cute_mla.aot_build.hub_kernel [--artifacts FOLDER] [--out FOLDER]

The folder has one build, build/torch-cuda: Python and cubins, for any version of torch and CUDA. `kernels` imports its __init__.py under
the id of metadata.json, so that several versions live in one process: all imports are relative, and the id is the namespace of the ops of
torch. The same commit and artefacts give the same bytes.
"""

from __future__ import annotations

import base64
import hashlib
import json
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cute_mla.manifest import ManifestError, Provenance
from cute_mla.spec.arch import ARCHS

from .fingerprint import PACKAGE
from .tools import ToolError
from .wheel import TREE, check_current, is_clean, packing_options, place_artifacts, stage

BUILD = Path("build", "torch-cuda")
# Rooms and modules of the package that a caller of the functions needs: no command, no engine, no compiler.
PARTS = (
    "__init__.py",
    "api",
    "cache.py",
    "flash_mla",
    "indexer.py",
    "integrations",
    "layer",
    "manifest",
    "ops",
    "parallel",
    "py.typed",
    "reference",
    "runtime",
    "shared_prefix.py",
    "simulator",
    "spec",
    "torch_ops.py",
    "tracing",
)
COMPILERS_ROOM = "cute_dsl"  # of the simulator: it needs the DSL
VERSION = 1  # of the interface on the Hub: a greater one may change what callers rely on
_LEAST_KERNELS = "0.17.0"
_ID_DIGITS = 12
_METADATA = "metadata.json"


def make_hub_kernel(tree: Path, artifacts: Path, out: Path) -> Path:
    """Write the kernel of a checkout with these artefacts to the folder `out`, in place of an earlier one. Return the folder of its build.

    Untracked files that git does not ignore are packed as well; the metadata then say that the sources are dirty.
    ToolError if git fails; ManifestError without artefacts, or if a file is not the one that the manifest describes.
    """
    with tempfile.TemporaryDirectory() as folder:
        staged, made = Path(folder) / "tree", Path(folder) / "made"
        stage(tree, staged)
        made.mkdir()
        for part in PARTS:
            source = staged / PACKAGE / part
            if source.is_dir():
                shutil.copytree(source, made / part, ignore=shutil.ignore_patterns(COMPILERS_ROOM))
            else:
                shutil.copyfile(source, made / part)
        shutil.copyfile(staged / "LICENSE", made / "LICENSE")
        provenance = place_artifacts(tree, artifacts, made / "artifacts")
        (made / _METADATA).write_text(json.dumps(_metadata(made, provenance), indent=2) + "\n")
        build = out / BUILD
        shutil.rmtree(build, ignore_errors=True)
        build.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(made, build)
    return build


def digests(build: Path) -> dict[str, str]:
    """Return the sha256 of every file but the metadata, in base64, by its path below the build."""
    files = sorted(path for path in build.rglob("*") if path.is_file() and path != build / _METADATA and path.suffix != ".pyc")
    return {path.relative_to(build).as_posix(): base64.b64encode(hashlib.sha256(path.read_bytes()).digest()).decode() for path in files}


def _metadata(build: Path, provenance: Provenance) -> dict[str, Any]:
    """Return the metadata, in the terms of `kernels`. The id is that of the contents: other bytes, another id."""
    files = digests(build)
    contents = hashlib.sha256(json.dumps(files).encode()).hexdigest()
    return {
        "id": f"cute_mla_cuda_{contents[:_ID_DIGITS]}",
        "name": "cute-mla",
        "version": VERSION,
        "kernels-minver": _LEAST_KERNELS,
        "license": "Apache-2.0",
        "python-depends": [],
        "backend": {"type": "cuda", "archs": [_capability(arch.gpu_arch) for arch in ARCHS.values()]},
        "digest": {"algorithm": "sha256", "files": files},
        "provenance": {
            "kernel-builder": {"version": f"cute-mla {provenance.version}"},
            "kernel": {"commit": provenance.commit, "dirty": not provenance.clean},
        },
    }


def _capability(gpu_arch: str) -> str:
    """Return an architecture as `kernels` writes it: "10.0f" for sm_100f."""
    digits, suffix = gpu_arch.removeprefix("sm_")[:-1], gpu_arch[-1]
    return f"{digits[:-1]}.{digits[-1]}{suffix}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. Return 0 if the folder was written, else 1."""
    options = packing_options("Write the Hugging Face kernel of this tree.", TREE / "dist" / "hf-kernel", arguments)
    try:
        check_current(options.artifacts)
        build = make_hub_kernel(TREE, options.artifacts, options.out)
    except (ToolError, ManifestError) as error:
        print(error, file=sys.stderr)
        return 1
    size = sum(path.stat().st_size for path in build.rglob("*") if path.is_file())
    print(f"{build}: {size / 1e6:.1f} MB, id {json.loads((build / _METADATA).read_text())['id']}")
    if not is_clean(TREE):
        print("the tree has local changes: no commit reproduces this kernel")
    return 0


if __name__ == "__main__":
    sys.exit(main())
