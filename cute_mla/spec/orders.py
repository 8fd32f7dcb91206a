"""Orders: names for the arithmetic of a kernel, so that equal names mean equal bits for equal inputs of a request.

An order is a hash of terms, which each op has beside its problem (order_terms): element types and roundings, tiles of keys and their
sequence, where a request is cut, the form of the softmax, classes of heads with kernels of their own. No term depends on the batch, the
number of SMs, the plan, pages or chunks. A kernel that comes to sum or round otherwise gets other terms, or a higher revision where they
read as before.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

from . import dense_decode, dense_prefill, gradient_orders, masked_prefill, mqa_logits, sparse_decode, sparse_prefill, topk_indices
from .arch import Arch
from .combine import CombineConfig
from .dense_decode import DenseDecodeConfig
from .kernel_ops import KERNEL_OPS, Config
from .mla import D_V
from .sparse_decode import SparseDecodeConfig
from .split_plan import INVARIANT_SPLIT

DIGITS = 16  # hexadecimal ones of a hash
# By the op of a kernel: the terms of a variant's order, None for a variant without one
TERMS: dict[str, Callable[[Any, Arch], dict[str, Any] | None]] = {
    "dense_decode": dense_decode.order_terms,
    "sparse_decode": sparse_decode.order_terms,
    "sparse_prefill": sparse_prefill.order_terms,
    "dense_prefill": dense_prefill.order_terms,
    "masked_prefill": masked_prefill.order_terms,
    "mqa_logits": mqa_logits.order_terms,
    "topk_indices": topk_indices.order_terms,
    **gradient_orders.TERMS,
}


def short_hash(*parts: str) -> str:
    """Return the first digits of the sha256 of the parts, one a line."""
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:DIGITS]


def terms_text(op: str, config: Config, arch: Arch, cut: bool = False) -> str | None:
    """Return the terms of a variant's order as canonical JSON, or None if the variant has no order.

    cut: whether a call has room for more keys than a batch-invariant decode takes at once. Sparse decode over a 16-bit latent has the order
    of sparse prefill if not; all other orders say where a request is cut.
    """
    terms = TERMS[op](config, arch)
    if terms is not None and cut and op == "sparse_decode":
        terms["split"] = INVARIANT_SPLIT
    return None if terms is None else json.dumps(terms, sort_keys=True)


@lru_cache
def orders(op: str, arch: Arch, cut: bool = False) -> Mapping[str, str]:
    """Return the order of each variant of a kernel's op, by the variant's name. Variants without an order are absent. cut: as above."""
    texts = {config.name: terms_text(op, config, arch, cut) for config in KERNEL_OPS[op].variants(arch)}
    return {name: short_hash(text) for name, text in texts.items() if text is not None}


@lru_cache
def kernels_of(op: str, arch: Arch, order: str) -> tuple[tuple[str, str], ...]:
    """Return op and variant of all kernels that may run in calls of an order, sorted: those of the order, and combine behind a decode."""
    known = (orders(op, arch), orders(op, arch, cut=True))
    configs = [config for config in KERNEL_OPS[op].variants(arch) if order in (named.get(config.name) for named in known)]
    decodes = [config for config in configs if isinstance(config, DenseDecodeConfig | SparseDecodeConfig)]
    combines = (CombineConfig(each.dtype, each.dims.latent if isinstance(each, DenseDecodeConfig) else D_V) for each in decodes)
    return tuple(sorted({*((op, config.name) for config in configs), *(("combine", merging.name) for merging in combines)}))
