"""Records of launches: which order a call computed in, and with which machine code. Both devices add each launch while a record is open."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, NamedTuple

from ..manifest import KernelEntry, Manifest, kernel_name
from ..spec.abi import ParamKind
from ..spec.arch import ARCHS, Arch
from ..spec.orders import TERMS, kernels_of, orders, short_hash
from .artifacts import load_artifacts

_SCALARS = (ParamKind.INT32, ParamKind.INT64, ParamKind.FLOAT32)

active: list[list[Call]] = []  # records that are open


class Call(NamedTuple):
    """One launch of an attention or indexer kernel.

    op: of the kernel. dims: fields of its variant, and its int32 arguments by name, such as the batch. order, code: as Fingerprint has
    them; order None for a decode whose plan decides where requests are cut.
    """

    op: str
    dims: Mapping[str, Any]
    order: str | None
    code: str | None


@contextmanager
def record() -> Iterator[list[Call]]:
    """Record the attention and indexer calls of all threads inside the block; yield the list that they are added to.

    A call of indexer_topk is one of mqa_logits and one of topk_indices for each chunk of its tokens. Launches that a CUDA graph repeats are
    recorded when the graph is captured. Outside of such blocks a launch looks at an empty list, and pays for nothing else.
    """
    calls: list[Call] = []
    active.append(calls)
    try:
        yield calls
    finally:
        active[:] = [other for other in active if other is not calls]


def add(kernel: KernelEntry, arguments: Sequence[Any]) -> None:
    """Add a launch to the open records, unless its op has no orders. arguments: at least the scalars, which are the last of a kernel."""
    if kernel.op not in TERMS:
        return
    scalars = [param for param in kernel.params if param.kind in _SCALARS]
    numbers = zip(scalars, arguments[len(arguments) - len(scalars) :], strict=True)
    dims = {**kernel.config, **{param.name: number for param, number in numbers if param.kind is ParamKind.INT32}}
    order, code = _named(kernel.op, kernel.arch, kernel.name, dims.get("max_splits", 0) > 1)
    if dims.get("max_splits") == 0:
        order = code = None
    for calls in tuple(active):
        calls.append(Call(kernel.op, dims, order, code))


@lru_cache
def _named(op: str, arch_name: str, kernel: str, cut: bool) -> tuple[str | None, str | None]:
    """Return order and code of a kernel. cut: as in orders."""
    arch = ARCHS[arch_name]
    order = orders(op, arch, cut).get(kernel.removeprefix(kernel_name(op, arch_name, "")))
    return order, None if order is None else code_of(op, arch, order, load_artifacts().manifest)


def code_of(op: str, arch: Arch, order: str, manifest: Manifest) -> str | None:
    """Return a hash of the cubins of all kernels that calls of an order may launch, or None if one of them is not built."""
    entries = [manifest.kernels.get(kernel_name(kernel_op, arch.name, name)) for kernel_op, name in kernels_of(op, arch, order)]
    hashes = [entry.cubin_sha256 for entry in entries if entry is not None]
    return short_hash(*hashes) if len(hashes) == len(entries) else None
