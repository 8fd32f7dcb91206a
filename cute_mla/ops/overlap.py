"""Overlap: a check that no output shares memory with another argument."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from ..runtime.tensor_memory import span_bytes

_OVERLAP_WORK = 10_000  # steps of numpy's search for an address that two tensors share: milliseconds


def check_no_overlap(written: Mapping[str, torch.Tensor | None], read: Mapping[str, torch.Tensor | None]) -> None:
    """Raise ValueError if a written tensor shares memory with a read one, or with another written one."""
    outputs = [(name, tensor, *_extent(tensor)) for name, tensor in written.items() if tensor is not None]
    if not outputs:
        return
    inputs = [(name, tensor, *_extent(tensor)) for name, tensor in read.items() if tensor is not None]
    for i, (name, tensor, start, end) in enumerate(outputs):
        for other_name, other, other_start, other_end in (*outputs[i + 1 :], *inputs):
            shared = start < other_end and other_start < end and _share_memory(tensor, other)
            if shared is None:
                raise ValueError(
                    f"{name} and {other_name} interleave in memory, and whether they share bytes takes too long to decide; "
                    "supported: results and workspace with memory of their own"
                )
            if shared:
                raise ValueError(f"{name} shares memory with {other_name}; supported: results and workspace with memory of their own")


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the address of a tensor's first byte and the address behind its last byte."""
    if not tensor.numel():
        return 0, 0
    start = tensor.data_ptr()
    return start, start + span_bytes(tensor)


def _share_memory(tensor: torch.Tensor, other: torch.Tensor) -> bool | None:
    """Return whether two tensors have a byte in common, as two slices of one tensor may. None where the search takes too long."""
    try:
        return np.shares_memory(_as_array(tensor), _as_array(other), max_work=_OVERLAP_WORK)  # type: ignore[arg-type]
    except (np.exceptions.TooHardError, OverflowError):
        return None


def _as_array(tensor: torch.Tensor) -> np.ndarray:
    """Return an array over a tensor's memory, without touching the memory."""

    class Memory:
        __array_interface__ = {  # noqa: RUF012
            "data": (tensor.data_ptr(), True),
            "shape": tuple(tensor.shape),
            "strides": tuple(stride * tensor.itemsize for stride in tensor.stride()),
            "typestr": f"|V{tensor.itemsize}",
            "version": 3,
        }

    return np.asarray(Memory())
