"""Names of the kernels that the simulated device runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from cute_mla.runtime.simulated_device import SimulatedDevice


def record_launches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that grows by the name of each kernel that runs, in order, without its architecture."""
    names: list[str] = []
    launch: Callable[..., Any] = SimulatedDevice.launch

    def record(self: SimulatedDevice, kernel: Any, *arguments: Any, **options: Any) -> Any:
        names.append(kernel.name.replace(f"_{self.arch.name}", ""))
        return launch(self, kernel, *arguments, **options)

    monkeypatch.setattr(SimulatedDevice, "launch", record)
    return names
