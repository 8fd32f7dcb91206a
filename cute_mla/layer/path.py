"""The two ways that a layer's attention is computed: by the kernels, or in plain torch where there are none."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple, Protocol

import torch

from .. import reference
from ..api import flash_attn_varlen_func, flash_mla_with_kvcache, merge_states
from ..api.tracing import constant_when_traced
from ..runtime.current import has_kernels
from ..spec.arch import ARCHS
from ..spec.mla import D_V
from .batch import DecodeRequests

MOST_STATES = 8  # that merge_states takes without a copy

logger = logging.getLogger(__name__)


class Packed(NamedTuple):
    """Ends of packed sequences, int32 [requests + 1], and the length of the longest."""

    cu_seqlens: torch.Tensor
    max_seqlen: int


class Cache(NamedTuple):
    """Keys [pages, page size, 1, 576], and of e4m3 ones the fp32 scale, if there is one."""

    keys: torch.Tensor
    descale: torch.Tensor | None


class AttentionPath(Protocol):
    """Attention, each time in the dtype of q. name: "kernels" or "reference"."""

    @property
    def name(self) -> str: ...

    def decode(self, q: torch.Tensor, cache: Cache, requests: DecodeRequests, scale: float) -> torch.Tensor:
        """Causal attention of q [requests, s_q, heads, 576] over the cache: [requests, s_q, heads, 512]."""
        ...

    def varlen(
        self, q: torch.Tensor, kv: tuple[torch.Tensor, torch.Tensor], ends: tuple[Packed, Packed], scale: float, causal: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention of packed queries over packed keys and values, as flash_attn_varlen_func. ends: of queries and of keys."""
        ...

    def merge(self, outs: Sequence[torch.Tensor], lses: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention over the union of the keys of up to MOST_STATES states, as merge_states."""
        ...


class KernelPath:
    """By the kernels, on a GPU or on the simulated device."""

    name = "kernels"

    def decode(self, q: torch.Tensor, cache: Cache, requests: DecodeRequests, scale: float) -> torch.Tensor:
        """As AttentionPath."""
        wanted = (requests.block_table, requests.cache_seqlens, D_V, requests.schedule, None, scale)
        out, _ = flash_mla_with_kvcache(q, cache.keys, *wanted, causal=True, descale_k=cache.descale)
        return out

    def varlen(
        self, q: torch.Tensor, kv: tuple[torch.Tensor, torch.Tensor], ends: tuple[Packed, Packed], scale: float, causal: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As AttentionPath."""
        (cu_seqlens_q, max_seqlen_q), (cu_seqlens_k, max_seqlen_k) = ends
        k, v = kv
        return flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale=scale, causal=causal)

    def merge(self, outs: Sequence[torch.Tensor], lses: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """As AttentionPath."""
        return merge_states(outs, lses)


class ReferencePath:
    """In plain torch, summed in fp32: slow, and on any device. Reads lengths on the host."""

    name = "reference"

    def decode(self, q: torch.Tensor, cache: Cache, requests: DecodeRequests, scale: float) -> torch.Tensor:
        """As AttentionPath."""
        wanted = (requests.block_table, requests.cache_seqlens, scale)
        out, _ = reference.dense_decode(q, cache.keys, *wanted, causal=True, descales=(None, cache.descale))
        return out.to(q.dtype)

    def varlen(
        self, q: torch.Tensor, kv: tuple[torch.Tensor, torch.Tensor], ends: tuple[Packed, Packed], scale: float, causal: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As AttentionPath."""
        queries, keys = ends
        k, v = kv
        out, lse = reference.dense_prefill(q, k, v, queries.cu_seqlens, keys.cu_seqlens, scale, causal)
        return out.to(q.dtype), lse

    def merge(self, outs: Sequence[torch.Tensor], lses: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """As AttentionPath."""
        out, lse = reference.merge_states(torch.stack(list(outs)), torch.stack(list(lses)))
        return out.to(outs[0].dtype), lse


def path_on(device: torch.device) -> AttentionPath:
    """The way that attention is computed on tensors of this device, here and now."""
    return KernelPath() if _are_kernels(device) else ReferencePath()


@constant_when_traced
def _are_kernels(device: torch.device) -> bool:
    """As has_kernels. A layer compiled inside simulate() is for the inside, one compiled outside for the outside."""
    return has_kernels(device)


@cache
def say_reference(device: torch.device) -> None:
    """Logs, once a device, that the reference is what computes."""
    kinds = ", ".join(f"{arch.capabilities_text} ({arch.name})" for arch in ARCHS.values())
    logger.warning(
        "attention on %s is computed by the torch reference, which is slow: the kernels are for GPUs of compute capability %s, and run on "
        "CPU tensors inside cute_mla.simulate()",
        device,
        kinds,
    )
