"""Record of the machine that a timing was taken on: GPU, driver, clocks, power, versions, commit and artefacts."""

from __future__ import annotations

import platform
import shutil
import subprocess
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from cute_mla.manifest import ManifestError, Provenance, manifest_sha256
from cute_mla.runtime.artifacts import artifacts_folder
from cute_mla.spec.arch import arch_for

_QUERY = {
    "clocks.sm": "sm_mhz",
    "clocks.mem": "memory_mhz",
    "clocks.max.sm": "max_sm_mhz",
    "power.draw": "power_w",
    "power.limit": "power_limit_w",
    "temperature.gpu": "temperature_c",
    "driver_version": "driver",
    "clocks_event_reasons.active": "throttle_reasons",
}

Runner = Callable[[list[str]], str]


def _run(command: list[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout


def gpu_state(device: int = 0, run: Runner = _run) -> dict[str, Any]:
    """Return clocks, power, temperature and driver as nvidia-smi reports them, or {"unavailable": reason}.

    Clocks and power are those under load only while work is queued on the device.
    """
    if run is _run and shutil.which("nvidia-smi") is None:
        return {"unavailable": "nvidia-smi is not on the path"}
    command = ["nvidia-smi", f"--id={device}", f"--query-gpu={','.join(_QUERY)}", "--format=csv,noheader,nounits"]
    try:
        values = [value.strip() for value in run(command).strip().splitlines()[0].split(",")]
    except (OSError, subprocess.SubprocessError, IndexError) as error:
        return {"unavailable": f"nvidia-smi failed: {error}"}
    if len(values) != len(_QUERY):
        return {"unavailable": f"nvidia-smi answered {len(values)} values to {len(_QUERY)} questions"}
    return {name: _number(value) for name, value in zip(_QUERY.values(), values, strict=True)}


def _number(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


def commit(folder: Path) -> str | None:
    """Return the commit checked out in a folder, with "+" appended for local changes.

    None unless the folder is the top of a checkout: a package installed inside another project must not report that project's commit.
    """
    try:
        if Path(_run(["git", "-C", str(folder), "rev-parse", "--show-toplevel"]).strip()) != folder.resolve():
            return None
        head = _run(["git", "-C", str(folder), "rev-parse", "HEAD"]).strip()
        changed = _run(["git", "-C", str(folder), "status", "--porcelain", "--untracked-files=no"]).strip()
    except (OSError, subprocess.SubprocessError):
        return None
    return head + ("+" if changed else "")


def wheel_commit(artifacts: Path) -> str | None:
    """Return the commit that a wheel's kernels were built from, with "+" for local changes; None without a readable provenance."""
    try:
        provenance = Provenance.load(artifacts)
    except ManifestError:
        return None
    return None if provenance is None else provenance.commit + ("" if provenance.clean else "+")


def now() -> str:
    """Return the current UTC time in ISO 8601, to the second."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def environment() -> dict[str, Any]:
    """Return what is needed to repeat a measurement: versions, commit, manifest hash and GPU."""
    record: dict[str, Any] = {
        "date": now(),
        "arch": None,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "commit": commit(Path(__file__).resolve().parents[2]) or wheel_commit(artifacts_folder()),
        "manifest_sha256": manifest_sha256(artifacts_folder()),
        "gpu": None,
    }
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        arch = arch_for(torch.cuda.get_device_capability())
        record |= {
            "arch": None if arch is None else arch.name,
            "gpu": properties.name,
            "sm_count": properties.multi_processor_count,
            "l2_bytes": properties.L2_cache_size,
            "memory_bytes": properties.total_memory,
            "idle": gpu_state(torch.cuda.current_device()),
        }
    return record
