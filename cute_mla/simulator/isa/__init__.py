"""The instruction table, by family. Importing this package fills it."""

from __future__ import annotations

from . import arithmetic as arithmetic
from . import async_copies as async_copies
from . import atomics as atomics
from . import barrier_ops as barrier_ops
from . import control as control
from . import conversions as conversions
from . import fences as fences
from . import floats as floats
from . import lanes as lanes
from . import launch_control as launch_control
from . import matrix_moves as matrix_moves
from . import memory_ops as memory_ops
from . import packed_floats as packed_floats
from . import tcgen05_moves as tcgen05_moves
from . import tcgen05_ops as tcgen05_ops
from . import tensor_copies as tensor_copies
from . import warp_products as warp_products
from . import wgmma_ops as wgmma_ops
from .table import NAMESPACE, Spec, decode

__all__ = ["NAMESPACE", "Spec", "decode"]
