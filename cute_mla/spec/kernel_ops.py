"""The one list of kernels: for each op of a kernel its launch parameters, variants, module and seconds of a build, and who launches it.

The closed list of the build, the parameters that a manifest must have, the times of a build and the lists of ops of the CLI follow from it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from . import (
    cache_gather,
    cache_insert,
    cache_rows,
    cache_write,
    combine,
    dense_decode,
    dense_prefill,
    dense_prefill_dkdv,
    dense_prefill_dq,
    head_sums,
    index_write,
    indexer_backward,
    key_lists,
    masked_prefill,
    merge_states,
    mqa_logits,
    row_statistics,
    row_sums,
    sparse_decode,
    sparse_prefill,
    sparse_prefill_dkv,
    sparse_prefill_dq,
    split_plan,
    topk_indices,
)
from .abi import Param
from .arch import ARCHS, SM90, SM100, Arch
from .mla import DENSE_DIMS, key_dtypes


class Config(Protocol):
    """Variant of a kernel: any frozen dataclass with a name."""

    @property
    def name(self) -> str:
        """Return the kernel's name in the manifest, without op and architecture."""


@dataclass(frozen=True)
class KernelOp:
    """The kernels of one op.

    params: of a launch, in order. closed: the variants of one of archs, the architectures that have kernels. seconds: of one core for a
        kernel and its process, the mean of a build of 194 s. Machines differ by far more than kernels do, so that only the ratios count.
    callers: ops of the public functions that launch the kernel; None: the op of the same name.
    by_arch: each architecture has a module, not all of them one.
    """

    params: tuple[Param, ...]
    closed: Callable[[Arch], Sequence[Config]]
    seconds: float
    callers: tuple[str, ...] | None = None
    by_arch: bool = False
    archs: tuple[Arch, ...] = tuple(ARCHS.values())

    def variants(self, arch: Arch) -> Sequence[Config]:
        """Return every variant that ships for an architecture."""
        return self.closed(arch) if arch in self.archs else ()

    def callers_of(self, op: str) -> tuple[str, ...]:
        """Return the ops of public functions that launch the kernel of this op."""
        return (op,) if self.callers is None else self.callers

    def module(self, op: str, arch: Arch) -> str:
        """Return the name of the module whose build(config, arch) returns the source."""
        return f"cute_mla.kernels.{op}.{arch.name if self.by_arch else 'kernel'}"


def _combines(arch: Arch) -> Sequence[Config]:
    columns = dense_decode.key_columns(arch)
    configs = (combine.CombineConfig(dtype, DENSE_DIMS[d_qk].latent) for d_qk in columns for dtype in key_dtypes(d_qk))
    return tuple(dict.fromkeys(configs))


def _same(variants: Callable[[], Sequence[Config]]) -> Callable[[Arch], Sequence[Config]]:
    """Return the variants of every architecture."""
    return lambda arch: variants()


_ATTENTION = (SM90, SM100)  # the others have no gradients
_DECODES, _BACKWARD, _SPARSE_BACKWARD = ("dense_decode", "sparse_decode"), ("dense_prefill_backward",), ("sparse_prefill_backward",)
_SUMS_OF_ROWS = (*_SPARSE_BACKWARD, "indexer_backward")
KERNEL_OPS: dict[str, KernelOp] = {
    "dense_decode": KernelOp(dense_decode.PARAMS, dense_decode.closed_variants, 2.1, by_arch=True),
    "sparse_decode": KernelOp(sparse_decode.PARAMS, sparse_decode.closed_variants, 2.1, by_arch=True),
    "sparse_prefill": KernelOp(sparse_prefill.PARAMS, sparse_prefill.closed_variants, 1.6, by_arch=True),
    "dense_prefill": KernelOp(dense_prefill.PARAMS, dense_prefill.closed_variants, 2.1, by_arch=True),
    "masked_prefill": KernelOp(masked_prefill.PARAMS, masked_prefill.closed_variants, 2.1, ("dense_prefill",), by_arch=True),
    "dense_prefill_dkdv": KernelOp(
        dense_prefill_dkdv.PARAMS, dense_prefill_dkdv.closed_variants, 1.5, _BACKWARD, by_arch=True, archs=_ATTENTION
    ),
    "dense_prefill_dq": KernelOp(dense_prefill_dq.PARAMS, dense_prefill_dq.closed_variants, 1.6, _BACKWARD, by_arch=True, archs=_ATTENTION),
    "split_plan": KernelOp(split_plan.PARAMS, lambda arch: (split_plan.SplitPlanConfig(),), 0.8, _DECODES),
    "combine": KernelOp(combine.PARAMS, _combines, 0.9, _DECODES),
    "merge_states": KernelOp(merge_states.PARAMS, _same(merge_states.closed_variants), 0.7),
    "mqa_logits": KernelOp(mqa_logits.PARAMS, _same(mqa_logits.closed_variants), 1.3, ("mqa_logits", "indexer_topk"), by_arch=True),
    "topk_indices": KernelOp(topk_indices.PARAMS, topk_indices.closed_variants, 1.3, ("indexer_topk", "topk_indices")),
    "sparse_prefill_dkv": KernelOp(
        sparse_prefill_dkv.PARAMS, sparse_prefill_dkv.closed_variants, 1.2, _SPARSE_BACKWARD, by_arch=True, archs=_ATTENTION
    ),
    "sparse_prefill_dq": KernelOp(
        sparse_prefill_dq.PARAMS, sparse_prefill_dq.closed_variants, 1.6, _SPARSE_BACKWARD, by_arch=True, archs=_ATTENTION
    ),
    "row_statistics": KernelOp(row_statistics.PARAMS, _same(row_statistics.closed_variants), 0.6, _SPARSE_BACKWARD, archs=_ATTENTION),
    "key_lists": KernelOp(key_lists.PARAMS, _same(key_lists.closed_variants), 0.6, _SUMS_OF_ROWS, archs=_ATTENTION),
    "row_sums": KernelOp(row_sums.PARAMS, _same(row_sums.closed_variants), 0.6, _SUMS_OF_ROWS, archs=_ATTENTION),
    "head_sums": KernelOp(head_sums.PARAMS, _same(head_sums.closed_variants), 1.0, archs=_ATTENTION),
    "indexer_backward": KernelOp(indexer_backward.PARAMS, _same(indexer_backward.closed_variants), 0.8, archs=_ATTENTION),
    "index_write": KernelOp(index_write.PARAMS, _same(index_write.closed_variants), 0.7),
    "cache_write": KernelOp(cache_write.PARAMS, _same(cache_rows.closed_variants), 0.6),
    "cache_insert": KernelOp(cache_insert.PARAMS, _same(cache_insert.closed_variants), 0.9),
    "cache_gather": KernelOp(cache_gather.PARAMS, _same(cache_rows.closed_variants), 0.6),
}
PARAMS_OF = {op: kernels.params for op, kernels in KERNEL_OPS.items()}
# Ops of public functions, which the suites test.
OPS = tuple(dict.fromkeys(caller for op, kernels in KERNEL_OPS.items() for caller in kernels.callers_of(op)))
# By the op of public functions: the architectures that have all of its kernels.
ARCHS_OF = {
    op: tuple(
        arch for arch in ARCHS.values() if all(arch in each.archs for name, each in KERNEL_OPS.items() if op in each.callers_of(name))
    )
    for op in OPS
}
