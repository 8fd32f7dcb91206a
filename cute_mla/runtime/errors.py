"""The errors that are not the caller's fault. Bad input is a ValueError; the simulator has its own SimulationError."""

from __future__ import annotations


class ArtifactError(RuntimeError):
    """The built kernels are missing, damaged, incomplete, or not for this architecture."""


class DeviceError(RuntimeError):
    """The driver or the device refused.

    name, code: CUDA's name and number of the error ("CUDA_ERROR_INVALID_VALUE", 1), or None where CUDA was not asked.
    """

    def __init__(self, message: str, *, name: str | None = None, code: int | None = None) -> None:
        super().__init__(message)
        self.name = name
        self.code = code
