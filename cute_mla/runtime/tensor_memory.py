"""Memory of tensors: the bytes that the elements of a tensor span, and whether its storage holds them."""

from __future__ import annotations

import torch


def span_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes from the first element of a tensor to the end of its last, 0 for an empty tensor."""
    if not tensor.numel():
        return 0
    return (sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1) * tensor.itemsize


def missing_memory(tensor: torch.Tensor) -> str | None:
    """Return why a tensor has no memory for its elements, or None if it has.

    Freed and shrunk storages (resize_) lack it, and so do tensors without a storage, such as wrapper subclasses and those of torch.func.
    """
    needed = span_bytes(tensor)
    if needed:
        needed += int(tensor.storage_offset()) * tensor.itemsize
    with torch._C.DisableTorchFunctionSubclass():
        try:
            storage = tensor.untyped_storage()
            address, held = storage.data_ptr(), storage.nbytes()
        except RuntimeError:
            return "no storage"
    if held < needed:
        return f"a storage of {held} bytes where its elements need {needed}"
    return "a storage without an address" if needed and not address else None
