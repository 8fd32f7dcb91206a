"""Attention of a layer by the kernels or, on devices without kernels, in plain torch."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple, Protocol

import torch

from .. import reference
from ..api import flash_attn_varlen_func, flash_mla_with_kvcache, merge_states
from ..api.tracing import constant_when_traced
from ..ops.limits import value_columns
from ..runtime.current import has_kernels
from ..spec.arch import ARCHS
from .batch import DecodeRequests

MAX_STATES = 8  # states that merge_states reads without a copy

logger = logging.getLogger(__name__)


class Packed(NamedTuple):
    """Lengths of packed sequences: cu_seqlens int32 [requests + 1], and the length of the longest sequence."""

    cu_seqlens: torch.Tensor
    max_seqlen: int


class Cache(NamedTuple):
    """A cache: keys [pages, page size, 1, latent + rotary columns], and the fp32 scale of e4m3 keys, or None."""

    keys: torch.Tensor
    descale: torch.Tensor | None


class AttentionPath(Protocol):
    """Implementation of attention. Results have the dtype of q."""

    @property
    def name(self) -> str:
        """Return "kernels" or "reference"."""
        ...

    def decode(self, q: torch.Tensor, cache: Cache, requests: DecodeRequests, scale: float) -> torch.Tensor:
        """Compute causal attention of q [requests, s_q, heads, columns of a key] over the cache: [requests, s_q, heads, latent columns]."""
        ...

    def varlen(
        self, q: torch.Tensor, kv: tuple[torch.Tensor, torch.Tensor], ends: tuple[Packed, Packed], scale: float, causal: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute out and lse of packed queries over packed keys and values, as flash_attn_varlen_func. ends: of queries and of keys."""
        ...

    def merge(self, outs: Sequence[torch.Tensor], lses: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """Merge up to MAX_STATES states into attention over the union of their keys, as merge_states."""
        ...


class KernelPath:
    """Attention by the kernels, on a GPU or on the simulated device."""

    name = "kernels"

    def decode(self, q: torch.Tensor, cache: Cache, requests: DecodeRequests, scale: float) -> torch.Tensor:
        """Decode as AttentionPath.decode."""
        table, lengths, schedule, d_v = requests.block_table, requests.cache_seqlens, requests.schedule, value_columns(q.shape[-1])
        out, _ = flash_mla_with_kvcache(q, cache.keys, table, lengths, d_v, schedule, None, scale, causal=True, descale_k=cache.descale)
        return out

    def varlen(
        self, q: torch.Tensor, kv: tuple[torch.Tensor, torch.Tensor], ends: tuple[Packed, Packed], scale: float, causal: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attend as AttentionPath.varlen."""
        (cu_seqlens_q, max_seqlen_q), (cu_seqlens_k, max_seqlen_k) = ends
        k, v = kv
        return flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale=scale, causal=causal)

    def merge(self, outs: Sequence[torch.Tensor], lses: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """Merge as AttentionPath.merge."""
        return merge_states(outs, lses)


class ReferencePath:
    """Attention in plain torch on any device, accumulated in fp32: slow. Reads lengths on the host."""

    name = "reference"

    def decode(self, q: torch.Tensor, cache: Cache, requests: DecodeRequests, scale: float) -> torch.Tensor:
        """Decode as AttentionPath.decode."""
        table, lengths = requests.block_table, requests.cache_seqlens
        out, _ = reference.dense_decode(q, cache.keys, table, lengths, scale, causal=True, descales=(None, cache.descale))
        return out.to(q.dtype)

    def varlen(
        self, q: torch.Tensor, kv: tuple[torch.Tensor, torch.Tensor], ends: tuple[Packed, Packed], scale: float, causal: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attend as AttentionPath.varlen."""
        queries, keys = ends
        k, v = kv
        out, lse = reference.dense_prefill(q, k, v, queries.cu_seqlens, keys.cu_seqlens, scale, causal)
        return out.to(q.dtype), lse

    def merge(self, outs: Sequence[torch.Tensor], lses: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """Merge as AttentionPath.merge."""
        out, lse = reference.merge_states(torch.stack(list(outs)), torch.stack(list(lses)))
        return out.to(outs[0].dtype), lse


def attention_path(device: torch.device) -> AttentionPath:
    """Return the implementation for tensors of this device: the kernels if they run here, else the reference."""
    return KernelPath() if _kernels_run_on(device) else ReferencePath()


@constant_when_traced
def _kernels_run_on(device: torch.device) -> bool:
    """Return has_kernels as a constant when traced: a layer compiled inside simulate() only works inside, and vice versa."""
    return has_kernels(device)


@cache
def warn_reference(device: torch.device) -> None:
    """Log a warning once per device: the reference computes attention."""
    kinds = ", ".join(f"{arch.capabilities_text} ({arch.name})" for arch in ARCHS.values())
    logger.warning(
        "attention on %s is computed by the torch reference, which is slow: the kernels are for GPUs of compute capability %s, and run on "
        "CPU tensors inside cute_mla.simulate()",
        device,
        kinds,
    )
