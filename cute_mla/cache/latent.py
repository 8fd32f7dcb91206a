"""Keys to and from a cache of bf16 or fp16 by slot: page * page size + row."""

from __future__ import annotations

import torch

from ..spec.mla import D_LATENT, D_QK, D_ROPE
from ..tensors import TensorSpec, check_dtype, check_shape, spec_of


def write_latent(k_cache: torch.Tensor, kv_c: torch.Tensor, k_pe: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    """Writes the keys of new tokens to their slots.

    k_cache: [pages, page size, 1, 576], any strides. kv_c: latent columns [tokens, 512]; k_pe: rotary columns [tokens, 64], both of
    k_cache's dtype. slot_mapping: int64 or int32 [tokens], distinct but for those outside [0, pages * page size), such as -1, which are
    skipped. Nothing waits for the device, so it can be captured in a CUDA graph. ValueError on other shapes or dtypes.
    """
    cache, slots = _check_cache(k_cache), spec_of("slot_mapping", slot_mapping)
    check_shape("slot_mapping", slots, ("tokens",))
    check_dtype("slot_mapping", slots, torch.int64, torch.int32)
    for name, columns, width in (("kv_c", kv_c, D_LATENT), ("k_pe", k_pe, D_ROPE)):
        spec = spec_of(name, columns)
        check_shape(name, spec, (slots.shape[0], width))
        check_dtype(name, spec, cache.dtype)
    pages, page_size = cache.shape[:2]
    if slots.shape[0] == 0 or pages * page_size == 0:
        return
    rows = torch.cat((kv_c, k_pe), dim=1)
    written = (slot_mapping >= 0) & (slot_mapping < pages * page_size)
    # Which tokens are skipped is known on the device alone: they write what a written one does, to the same place. Where there is none,
    # all write what slot 0 holds.
    one_of_them = written.int().argmax()
    source = torch.where(written, torch.arange(slots.shape[0], device=rows.device), one_of_them)
    places = torch.where(written.any(), slot_mapping.long()[source], 0)
    where = (places // page_size, places % page_size)
    flat = k_cache.squeeze(2)
    flat[where] = torch.where(written.any(), rows[source], flat[where])


def gather_latent(k_cache: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """The keys at slots, int64 or int32 [keys], each in [0, pages * page size): [keys, 576] in the cache's dtype.

    k_cache: as in write_latent. ValueError on other shapes or dtypes.
    """
    cache, spec = _check_cache(k_cache), spec_of("slots", slots)
    check_shape("slots", spec, ("keys",))
    check_dtype("slots", spec, torch.int64, torch.int32)
    page_size = cache.shape[1]
    return k_cache.squeeze(2)[slots // page_size, slots % page_size]


def _check_cache(k_cache: torch.Tensor) -> TensorSpec:
    spec = spec_of("k_cache", k_cache)
    check_shape("k_cache", spec, ("pages", "page size", 1, D_QK))
    check_dtype("k_cache", spec, torch.bfloat16, torch.float16, torch.float32)
    return spec
