"""Check that this machine can verify and time the kernels: packages, artefacts, driver and GPU.

    python -m cute_mla.profiles.preflight FILE      writes the findings to FILE as JSON

Exits with 1, and the reasons on stderr, if something is missing.
"""

from __future__ import annotations

import importlib
import json
import platform
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cute_mla.spec.arch import Arch

PACKAGES = ("torch", "numpy", "click", "rich", "cuda.bindings.driver")
LEAST_PYTHON = (3, 11)


def missing_packages() -> list[str]:
    """Return the reasons why required packages cannot be imported, or why Python is too old."""
    if sys.version_info < LEAST_PYTHON:
        return [f"Python {platform.python_version()} is older than {'.'.join(map(str, LEAST_PYTHON))}"]
    problems = []
    for name in PACKAGES:
        try:
            importlib.import_module(name)
        except ImportError as error:
            problems.append(f"{name} cannot be imported: {error}")
    return problems


def newest_toolkit(archs: Sequence[Arch]) -> tuple[int, int]:
    """Check the hashes of all artefacts for these architectures, and return the newest CUDA version that built one of them.

    ArtifactError if an artefact is unusable, or if there is none.
    """
    from cute_mla.runtime.artifacts import cubin_toolkit, load_artifacts
    from cute_mla.runtime.errors import ArtifactError

    artifacts = load_artifacts()
    names = [arch.name for arch in archs]
    entries = [entry for entry in artifacts.manifest.kernels.values() if entry.arch in names]
    if not entries:
        raise ArtifactError(f"the manifest in {artifacts.folder} has no kernel for {' or '.join(names)}")
    return max(cubin_toolkit(artifacts.cubin(entry)) or (0, 0) for entry in entries)


def device_problems(archs: Sequence[Arch]) -> list[str]:
    """Return the reasons why the artefacts cannot run on the current GPU with its driver. The GPU must have one of `archs`."""
    from cute_mla.runtime import driver
    from cute_mla.runtime.errors import ArtifactError, DeviceError

    from .measure.cuda_bench import matching_arch

    problems = []
    toolkit, version = (0, 0), None
    try:
        archs = [matching_arch(archs)]
        driver.init()
        version = driver.version()
    except DeviceError as error:
        problems.append(str(error))
    try:
        toolkit = newest_toolkit(archs)
    except ArtifactError as error:
        problems.append(str(error))
    if version is not None and version < toolkit[0] * 1000:
        problems.append(f"the driver is for CUDA {driver.version_text(version)}; the kernels need one for CUDA {toolkit[0]}.0")
    return problems


def examine() -> dict[str, Any]:
    """Return the findings, with the reasons why the kernels cannot run here under "problems". Later checks depend on earlier ones."""
    found: dict[str, Any] = {"python": platform.python_version(), "executable": sys.executable}
    problems = missing_packages()
    if not problems:
        from cute_mla.spec.arch import ARCHS

        from .measure.environment import environment

        archs = list(ARCHS.values())
        found["environment"] = environment()
        problems = device_problems(archs)
    return {**found, "problems": problems}


def main(file: Path) -> int:
    """Write the findings to a file. Return 0 if the kernels can run here, else 1."""
    outcome = examine()
    file.write_text(json.dumps(outcome, indent=1, default=str) + "\n", encoding="utf-8")
    for problem in outcome["problems"]:
        print(f"cannot run here: {problem}", file=sys.stderr)
    return 1 if outcome["problems"] else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
