"""TMA loads of one box, to this CTA or to both CTAs of a pair."""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import cute
from cutlass.experimental import primitives

BOTH_CTAS = 0b11


def prefetch_map(tensor_map: Any) -> None:
    """Bring the map to where the first copy looks for it. One thread; the map is a kernel parameter."""
    primitives.prefetch_tensormap(tensor_map.get_ptr())


def prefetch_box(tensor_map: Any, coordinates: tuple[Any, ...]) -> None:
    """Ask L2 for the box at `coordinates` (innermost first)."""
    primitives.cp_async_bulk_tensor_prefetch(tensor_map.get_ptr(), list(coordinates), [])


def load_box(target: cute.Pointer, tensor_map: Any, coordinates: tuple[Any, ...], barrier: cute.Pointer) -> None:
    """Start the copy of the box at `coordinates` (innermost first) to `target`; its bytes count on `barrier`."""
    primitives.cp_async_bulk_tensor_shared_cta_global(target.raw_ptr(), tensor_map.get_ptr(), coordinates, barrier.raw_ptr())


def multicast_box(target: cute.Pointer, tensor_map: Any, coordinates: tuple[Any, ...], barrier: cute.Pointer) -> None:
    """Start a copy like load_box; the box lands at the same address in both CTAs and counts on the barrier of each."""
    primitives.cp_async_bulk_tensor_shared_cluster_global(
        target.raw_ptr(),
        tensor_map.get_ptr(),
        coordinates,
        barrier.raw_ptr(),
        [],
        multicast_mask=cutlass.Int16(BOTH_CTAS),
    )


class _BarrierAddress:
    """Barrier operand of the two-CTA copy, which clears the rank bit of the address itself."""

    def __init__(self, barrier: cute.Pointer) -> None:
        self.pointer = barrier.raw_ptr()
        self.space = cutlass.AddressSpace.smem

    def data_ptr(self) -> Any:
        return self.pointer


def pair_box(target: cute.Pointer, tensor_map: Any, coordinates: tuple[Any, ...], barrier: cute.Pointer) -> None:
    """Start a copy like load_box; the bytes count on the barrier of the pair's even CTA. Blackwell."""
    primitives.cp_async_bulk_tensor_shared_cluster_global(
        target.raw_ptr(),
        tensor_map.get_ptr(),
        coordinates,
        _BarrierAddress(barrier),
        [],
        group=primitives.CTAGroup.CTA_2,
    )
