"""The instruction table, by family. Importing this package fills it."""

from __future__ import annotations

from . import arithmetic, async_copies, barrier_ops, control, conversions, floats, lanes, memory_ops, wgmma_ops
from .table import NAMESPACE, Spec, decode

__all__ = ["NAMESPACE", "Spec", "decode"]

FAMILIES = (arithmetic, floats, conversions, lanes, memory_ops, control, barrier_ops, async_copies, wgmma_ops)
