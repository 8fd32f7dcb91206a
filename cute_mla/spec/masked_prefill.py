"""Masked dense prefill: dense prefill in which a mask of the caller says, token by token, which keys of its sequence a token sees.

Formula, work items and grid are those of dense_prefill. All heads share the mask. Key tiles of which no row of an item sees a key are
neither loaded nor multiplied.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from .abi import Float32, Int32, Int64, Pointer, TensorMap, params_of
from .arch import Arch
from .dense_prefill import DensePrefillConfig
from .dense_prefill import closed_variants as unmasked_variants
from .dense_prefill import order_terms as unmasked_terms
from .mla import BF16

MASK_WORD_KEYS = 32  # keys of a word of a mask
HEAD_DIMS = (192, 128)  # columns of q and k
DTYPE = BF16


class MaskedPrefillArguments(NamedTuple):
    """Launch arguments of masked_prefill, in ABI order: those of dense_prefill, and the mask."""

    q_map: TensorMap  # as in DensePrefillArguments, like all others up to `causal`
    k_map: TensorMap
    v_map: TensorMap
    q: Pointer
    cu_seqlens_q: Pointer
    cu_seqlens_k: Pointer
    out: Pointer
    lse: Pointer
    key_mask: Pointer  # int32 [total_q, mask_words]: the token sees key j of its sequence iff bit j % 32 of word j / 32 is set
    q_stride_token: Int64
    q_stride_head: Int64
    out_stride_token: Int64
    out_stride_head: Int64
    lse_stride_token: Int64
    lse_stride_head: Int64
    mask_stride_token: Int64  # in words
    scale_log2: Float32
    empty_lse: Float32
    batch: Int32
    h_q: Int32
    heads_per_kv: Int32
    total_q: Int32
    total_k: Int32
    row_blocks: Int32
    causal: Int32
    mask_words: Int32  # of a token; keys beyond them are hidden


PARAMS = params_of(MaskedPrefillArguments)


def closed_variants(arch: Arch) -> tuple[DensePrefillConfig, ...]:
    """Return every variant that ships for an architecture."""
    return tuple(config for config in unmasked_variants(arch) if config.dtype == DTYPE and config.d_qk in HEAD_DIMS)


def order_terms(config: DensePrefillConfig, arch: Arch) -> dict[str, Any]:
    """Return the terms of a variant's order: those without a mask, and tiles without a visible key, which are skipped."""
    terms = unmasked_terms(config, arch)
    return {**terms, "op": "masked_prefill", "keys": f"{terms['keys']}, those that a row of the item sees"}
