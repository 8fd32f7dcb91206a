"""MLA kernels compiled ahead of time: torch tensors in, torch tensors out, on a GPU or on the simulated device.

Names are looked up on first use, so that importing the package loads neither torch nor a driver binding.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .api import (
        fingerprint,
        flash_attn_varlen_backward,
        flash_attn_varlen_func,
        flash_attn_varlen_kvpacked_func,
        flash_attn_varlen_qkvpacked_func,
        flash_mla_sparse_bwd,
        flash_mla_sparse_fwd,
        flash_mla_with_kvcache,
        get_mla_metadata,
        is_supported,
        merge_states,
        plan_sparse_backward,
        row_digest,
        workspace_size,
    )
    from .runtime.current import simulate
    from .runtime.errors import ArtifactError, DeviceError
    from .runtime.recording import record
    from .simulator import SimulationError

__version__ = "0.1.0"

__all__ = [
    "ArtifactError",
    "DeviceError",
    "SimulationError",
    "__version__",
    "fingerprint",
    "flash_attn_varlen_backward",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_mla_sparse_bwd",
    "flash_mla_sparse_fwd",
    "flash_mla_with_kvcache",
    "get_mla_metadata",
    "is_supported",
    "merge_states",
    "plan_sparse_backward",
    "record",
    "row_digest",
    "simulate",
    "workspace_size",
]

_HOME_OF = {
    "ArtifactError": ".runtime.errors",
    "DeviceError": ".runtime.errors",
    "SimulationError": ".simulator",
    "fingerprint": ".api",
    "flash_attn_varlen_backward": ".api",
    "flash_attn_varlen_func": ".api",
    "flash_attn_varlen_kvpacked_func": ".api",
    "flash_attn_varlen_qkvpacked_func": ".api",
    "flash_mla_sparse_bwd": ".api",
    "flash_mla_sparse_fwd": ".api",
    "flash_mla_with_kvcache": ".api",
    "get_mla_metadata": ".api",
    "is_supported": ".api",
    "merge_states": ".api",
    "plan_sparse_backward": ".api",
    "record": ".runtime.recording",
    "row_digest": ".api",
    "simulate": ".runtime.current",
    "workspace_size": ".api",
}


def __getattr__(name: str) -> Any:
    """Load a public name from the module that defines it."""
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(home, __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """Return the public names, loaded or not."""
    return sorted({*globals(), *__all__})
