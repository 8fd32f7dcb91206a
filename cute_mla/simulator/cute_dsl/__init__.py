"""CuTe-DSL programs on the simulated device: kernels that are compiled in this process run here, not on a GPU.

with cute_dsl.simulate("sm_90a", schedule="lazy") as device:
    program(from_dlpack(x), from_dlpack(y))
"""

from __future__ import annotations

try:
    from .context import simulate
except ImportError as error:
    raise ImportError(
        "cute_mla.simulator.cute_dsl needs the nvidia-cutlass-dsl of the build extra: pip install 'cute-mla[build]'"
    ) from error
from .device import CaughtLaunch, ProgramDevice

__all__ = ["CaughtLaunch", "ProgramDevice", "simulate"]
