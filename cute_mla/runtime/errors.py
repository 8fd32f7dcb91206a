"""Errors that are not the caller's fault. Bad input raises ValueError; the simulator raises its own SimulationError."""

from __future__ import annotations


class ArtifactError(RuntimeError):
    """Error of the built kernels: missing, damaged, incomplete, or not for this architecture."""


class DeviceError(RuntimeError):
    """Error of the driver or the device.

    name, code: CUDA's name and number of the error ("CUDA_ERROR_INVALID_VALUE", 1), or None if no CUDA call failed.
    """

    def __init__(self, message: str, *, name: str | None = None, code: int | None = None) -> None:
        super().__init__(message)
        self.name = name
        self.code = code
