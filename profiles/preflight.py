"""Whether this machine can verify and time the kernels: packages, artefacts, driver and GPU, each with one clear answer.

Run as `python -m cute_mla.profiles.preflight FILE`: writes what it found to FILE as JSON, and exits 1 with the reason on
stderr if something is missing.
"""

from __future__ import annotations

import importlib
import json
import platform
import sys
from pathlib import Path
from typing import Any

PACKAGES = ("torch", "numpy", "click", "rich", "cuda.bindings.driver")
LEAST_PYTHON = (3, 11)
LEAST_CUDA_DRIVER = 13000  # what the cubins need: CUDA 13, driver 580


def missing_packages() -> list[str]:
    """Reasons why packages that a user's machine needs cannot be imported."""
    if sys.version_info < LEAST_PYTHON:
        return [f"Python {platform.python_version()} is older than {'.'.join(map(str, LEAST_PYTHON))}"]
    problems = []
    for name in PACKAGES:
        try:
            importlib.import_module(name)
        except ImportError as error:
            problems.append(f"{name} cannot be imported: {error}")
    return problems


def artifact_problems(arch: str) -> list[str]:
    """Reasons why the artefacts that came along cannot be used."""
    from ..runtime.errors import ArtifactError
    from ..runtime.library import load_artifacts

    try:
        artifacts = load_artifacts()
        entries = [entry for entry in artifacts.manifest.kernels.values() if entry.arch == arch]
        for entry in entries:
            artifacts.cubin(entry)
    except ArtifactError as error:
        return [str(error)]
    return [] if entries else [f"the manifest in {artifacts.folder} has no kernel for {arch}"]


def gpu_problems(arch: str) -> list[str]:
    """Reasons why kernels of this architecture cannot run on the current GPU."""
    from ..runtime import driver
    from ..runtime.errors import DeviceError
    from ..spec.arch import ARCHS
    from .cuda_bench import matching_gpu

    problem = matching_gpu(ARCHS[arch])
    if problem:
        return [problem]
    try:
        driver.init()
        version = driver.version()
    except DeviceError as error:
        return [str(error)]
    if version < LEAST_CUDA_DRIVER:
        return [f"the driver supports CUDA {driver.version_text(version)}; the kernels need {driver.version_text(LEAST_CUDA_DRIVER)}"]
    return []


def examine(arch: str) -> dict[str, Any]:
    """What is here, and the reasons, if any, why the kernels cannot run here. Later checks need what earlier ones found."""
    found: dict[str, Any] = {"arch": arch, "python": platform.python_version(), "executable": sys.executable}
    problems = missing_packages()
    if not problems:
        from ..spec.arch import ARCHS
        from .cuda_bench import environment

        found["environment"] = environment(ARCHS[arch])
        problems = artifact_problems(arch) + gpu_problems(arch)
    return {**found, "problems": problems}


def main(file: Path, arch: str = "sm90") -> int:
    """Examines and writes the outcome; 0 if the kernels can run here, else 1."""
    outcome = examine(arch)
    file.write_text(json.dumps(outcome, indent=1, default=str) + "\n", encoding="utf-8")
    for problem in outcome["problems"]:
        print(f"cannot run here: {problem}", file=sys.stderr)
    return 1 if outcome["problems"] else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
