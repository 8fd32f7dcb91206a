"""What a timing depends on besides the kernel: GPU, driver, clocks, power, commit and artefacts."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ..manifest import ManifestError, Provenance

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
    """Clocks, power, temperature and driver by nvidia-smi, numbers where they are; {"unavailable": why} where it cannot tell.

    Under load only while work is queued on the device: call it then.
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
    """The commit checked out in a folder, with "+" when it has local changes. None unless the folder is the top of a checkout:
    installed into somebody's project, this code is not of that project's commit."""
    try:
        if Path(_run(["git", "-C", str(folder), "rev-parse", "--show-toplevel"]).strip()) != folder.resolve():
            return None
        head = _run(["git", "-C", str(folder), "rev-parse", "HEAD"]).strip()
        changed = _run(["git", "-C", str(folder), "status", "--porcelain", "--untracked-files=no"]).strip()
    except (OSError, subprocess.SubprocessError):
        return None
    return head + ("+" if changed else "")


def wheel_commit(artifacts: Path) -> str | None:
    """The commit that a wheel's kernels are from, with "+" as above. None where they are not a wheel's, or do not say it."""
    try:
        provenance = Provenance.load(artifacts)
    except ManifestError:
        return None
    return None if provenance is None else provenance.commit + ("" if provenance.clean else "+")


def now() -> str:
    """The present, in UTC."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
