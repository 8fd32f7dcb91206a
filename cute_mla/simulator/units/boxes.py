"""TMA boxes between shared and global memory, with the shadow that tells written bytes."""

from __future__ import annotations

import numpy as np

from ..numerics import tma
from ..state.async_work import GroupedCopy
from ..state.cta import Cta
from ..state.engine_protocol import Engine
from ..state.memory import Buffer, SharedMemory
from ..state.origin import Origin


def buffer_of(engine: Engine, box: tma.Box, write: bool) -> Buffer | None:
    """Return the buffer that a box lies in; None when the box is outside its tensor."""
    low, high = box.gmem_range
    return engine.memory.require(low, high, write) if high > low else None


def load_box(engine: Engine, box: tma.Box, smem: SharedMemory) -> None:
    """Copy a box from global to shared memory, with the shadow of written bytes."""
    smem.check(*box.smem_range, "TMA write")
    buffer = buffer_of(engine, box, False)
    empty = np.empty(0, np.uint8)
    tma.load_box(box, empty if buffer is None else buffer.data, 0 if buffer is None else buffer.address, smem.data)
    if buffer is not None and buffer.valid is not None:
        tma.load_box(box, buffer.valid, buffer.address, smem.valid, fill=1)
        return
    low, high = box.smem_range
    if high - low == box.nbytes:
        smem.valid[low:high] = 1
        return
    units = smem.valid[box.smem_base : box.smem_base + box.layout.high].reshape(-1, box.layout.unit)
    units[box.layout.inside] = 1
    if box.layout.outside is not None:
        units[box.layout.outside] = 1


def box_store(engine: Engine, cta: Cta, box: tma.Box, origin: Origin, add: bool) -> GroupedCopy:
    """Return the copy of a box from shared to global memory; add: its elements are added there."""
    held: list[np.ndarray] = []

    def read() -> None:
        cta.smem.check(*box.smem_range, "TMA read")
        held.append(cta.smem.data.copy() if add else tma.read_shared(box, cta.smem.data))
        if not tma.read_shared(box, cta.smem.valid).view(np.uint8).all():
            engine.report(origin, "poison", "a TMA store writes undefined bytes of shared memory to global memory")

    def write() -> None:
        buffer = buffer_of(engine, box, True)
        if buffer is None:
            return
        if add:
            tma.add_box(box, buffer.data, buffer.address, held[0])
        else:
            tma.write_global(box, buffer.data, buffer.address, held[0])
        if buffer.valid is not None:
            ones = np.frombuffer(b"\1" * box.layout.unit, np.dtype(f"V{box.layout.unit}"))[0]
            dtype = held[0].dtype if not add else np.dtype(f"u{box.layout.unit}")
            marks = np.full(box.layout.inside.shape, ones, np.dtype(f"V{box.layout.unit}")).view(dtype)
            tma.write_global(box, buffer.valid, buffer.address, marks)
        engine.note_progress()

    return GroupedCopy(read, write, origin, box.smem_range)
