"""fingerprint: which order of arithmetic a call has, before it is made. row_digest: the bits of a result, in a number a row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ..ops.arguments import check_flag
from ..ops.limits import SPARSE_BACKWARD, check_op
from ..ops.row_digest import digests
from ..ops.tensor_spec import DTYPE_NAMES
from ..runtime.artifacts import load_artifacts
from ..runtime.errors import ArtifactError
from ..runtime.recording import code_of
from ..spec import dense_prefill, head_sums, indexer_backward, key_lists, sparse_prefill_dkv, sparse_prefill_dq
from ..spec.arch import ALIASES, ARCHS, Arch
from ..spec.cache_format import LATENT
from ..spec.cache_rows import FP8_576
from ..spec.dense_decode import FP8, FP8_CACHE, TILE_ROWS, TILINGS, DenseDecodeProblem
from ..spec.dense_decode import LATENT as SIXTEEN_BITS
from ..spec.kernel_ops import Config
from ..spec.mla import BF16
from ..spec.mqa_logits import MqaLogitsProblem
from ..spec.orders import short_hash, terms_text
from ..spec.row_statistics import RowStatisticsConfig
from ..spec.row_sums import RowSumsConfig
from ..spec.sparse_decode import DECODED, DECODED_BESIDE, SparseDecodeProblem, serving_kernels
from ..spec.sparse_prefill import SparsePrefillProblem
from ..spec.split_plan import INVARIANT_SPLIT_TILES, TILE_KEYS
from ..spec.topk_indices import closed_variants
from .support import E4M3, is_supported

Kernels = tuple[tuple[str, Config], ...]  # op and variant of each kernel of a call


class Fingerprint(NamedTuple):
    """The arithmetic of a call.

    order: 16 hexadecimal digits. Calls of equal orders give a request equal bits, whatever else their batches hold.
    code: 16 digits of the cubins of all kernels that may run in the order, or None if one of them is not built. Equal orders with equal
    code run the same instructions; with different code equal bits are claimed, and tested.
    terms: what the order is the hash of, as JSON.
    """

    order: str
    code: str | None
    terms: str


def fingerprint(op: str, arch: str, *, few_heads: bool = True, **features: Any) -> Fingerprint:
    """Return the name of the arithmetic of batch-invariant calls with these features.

    op         "dense_decode", "sparse_decode", "dense_prefill", "sparse_prefill", "sparse_prefill_backward", "mqa_logits",
               "indexer_topk", "topk_indices", "head_sums" or "indexer_backward"
    arch       as in is_supported
    few_heads  as in flash_mla_with_kvcache
    features   as in is_supported. Needed are head_dim in dense decode, prefill and backward, and head_sums, h_q in sparse decode, prefill
               and backward, mqa_logits and indexer_topk, and in sparse decode kv_format with an FP8 cache, extra_kv_format with
               extra_cache, and h_q in dense decode on sm120. dtype is "bf16" if it is not given. Features that decide on no bit, such as
               s_q, page_size and topk, are checked and have no influence; but in sparse decode over a 16-bit latent, topk beyond 8,192.
               Of a backward with dkv or dk in bf16

    Orders know nothing of batch, number of SMs, plan, chunks, pages and workspace. Decode without batch_invariant has no order: its plan
    decides where a request is cut. Nothing is launched, and no device is needed; code is of the kernels that are built here.

    Raises ValueError if no kernel supports the features, or if one that decides is missing.
    """
    check_op(op, tuple(_KERNELS))
    few_heads = check_flag("few_heads", few_heads)
    supported, reason = is_supported(op, arch, **features)
    if not supported:
        raise ValueError(reason)
    if not features.get("batch_invariant", True):
        raise ValueError("batch_invariant is False; supported: True, since other calls of decode have no order")
    known = ARCHS[ALIASES.get(arch, arch)]
    cut = (features.get("topk") or 0) > INVARIANT_SPLIT_TILES * TILE_KEYS
    found = [_of_kernel(*kernel, known, cut) for kernel in _KERNELS[op](known, {**features, "few_heads": few_heads})]
    if len(found) == 1:
        return found[0]
    codes = [each.code for each in found if each.code is not None]
    code = short_hash(*codes) if len(codes) == len(found) else None
    return Fingerprint(short_hash(*(each.order for each in found)), code, f"[{', '.join(each.terms for each in found)}]")


def row_digest(x: torch.Tensor) -> torch.Tensor:
    """Return a number for each row of x that equal bits give equal, int64 [rows]; rows are all but the last dimension, flattened.

    x    any dtype, shape with one dimension or more, strides and device

    Each element is mixed with its place in the row, and a row's words are added in 64 bits, so that neither device nor batch changes the
    number. -0 and +0 differ, and so do NaNs with different bits. Two different rows have equal numbers by accident alone: this is no
    cryptographic hash. Made of torch ops; gradients stop.

    Raises ValueError on anything but a tensor with a dimension.
    """
    return digests(x)


def _of_kernel(op: str, config: Config, arch: Arch, cut: bool) -> Fingerprint:
    """Return the fingerprint of one kernel, without code where artefacts are missing. cut: as in terms_text."""
    terms = terms_text(op, config, arch, cut) or ""
    order = short_hash(terms)
    try:
        return Fingerprint(order, code_of(op, arch, order, load_artifacts().manifest), terms)
    except ArtifactError:
        return Fingerprint(order, None, terms)


def _needed(name: str, features: dict[str, Any]) -> Any:
    """Return a feature. ValueError if it is missing."""
    if features.get(name) is None:
        raise ValueError(f"{name} is missing; supported: the value of the call, since bits depend on it")
    return features[name]


def _dtype(features: dict[str, Any]) -> str:
    """Return the name of the dtype."""
    given = features.get("dtype", BF16)
    return DTYPE_NAMES[given] if isinstance(given, torch.dtype) else str(given)


def _dense_decode(arch: Arch, features: dict[str, Any]) -> Kernels:
    dtype, converted = _dtype(features), features.get("fp8_kvcache") or features.get("kv_format") == FP8_576.name
    operands = FP8 if dtype == E4M3 else FP8_CACHE if converted else SIXTEEN_BITS
    out, d_qk = BF16 if dtype == E4M3 else dtype, _needed("head_dim", features)
    heads = _needed("h_q", features) if TILINGS[arch.name].takes_rows64(TILE_ROWS) else 1
    call = DenseDecodeProblem(arch, out, 1, 1, heads, 1, TILE_KEYS, 1, batch_invariant=True, operands=operands, d_qk=d_qk)
    return (("dense_decode", call.config),)


def _sparse_decode(arch: Arch, features: dict[str, Any]) -> Kernels:
    is_latent = not features.get("fp8_kvcache") and features.get("head_dim", LATENT.d_qk) == LATENT.d_qk
    name = (features.get("kv_format") or LATENT.name) if is_latent else _needed("kv_format", features)
    extra = _needed("extra_kv_format", features) if features.get("extra_cache") else features.get("extra_kv_format")
    kernels = serving_kernels(DECODED[name], None if extra is None else DECODED_BESIDE[extra]) or name
    heads, few_heads = _needed("h_q", features), features["few_heads"]
    call = SparseDecodeProblem(arch, BF16, kernels, 1, 1, heads, TILE_KEYS, batch_invariant=True, few_heads=few_heads)
    return (("sparse_decode", call.config),)


def _sparse_prefill(arch: Arch, features: dict[str, Any]) -> Kernels:
    call = SparsePrefillProblem(arch, BF16, _needed("head_dim", features), 1, 1, _needed("h_q", features))
    return (("sparse_prefill", call.config),)


def _sparse_prefill_backward(arch: Arch, features: dict[str, Any]) -> Kernels:
    d_qk, h_q = _needed("head_dim", features), _needed("h_q", features)
    return (
        ("row_statistics", RowStatisticsConfig(BF16)),
        ("sparse_prefill_dq", sparse_prefill_dq.config_for(arch, d_qk, h_q)),
        ("sparse_prefill_dkv", sparse_prefill_dkv.config_for(d_qk, h_q)),
        *_row_sums(d_qk),
    )


def _row_sums(columns: int) -> Kernels:
    return ("key_lists", key_lists.closed_variants()[0]), ("row_sums", RowSumsConfig(columns, BF16))


def _head_sums(arch: Arch, features: dict[str, Any]) -> Kernels:
    columns = _needed("head_dim", features)
    return tuple(("head_sums", config) for config in head_sums.closed_variants() if config.columns == columns)


def _indexer_backward(arch: Arch, features: dict[str, Any]) -> Kernels:
    return ("indexer_backward", indexer_backward.closed_variants()[0]), *_row_sums(head_sums.INDEX_COLUMNS)


def _dense_prefill(arch: Arch, features: dict[str, Any]) -> Kernels:
    config = dense_prefill.variant(arch, _dtype(features), _needed("head_dim", features))
    return (("masked_prefill" if features.get("key_mask") else "dense_prefill", config),)


def _mqa_logits(arch: Arch, features: dict[str, Any]) -> Kernels:
    return (("mqa_logits", MqaLogitsProblem(False, _needed("h_q", features), 1, 1, 1).config),)


def _topk_indices(arch: Arch, features: dict[str, Any]) -> Kernels:
    return (("topk_indices", closed_variants(arch)[0]),)


def _indexer_topk(arch: Arch, features: dict[str, Any]) -> Kernels:
    return *_mqa_logits(arch, features), *_topk_indices(arch, features)


_KERNELS: dict[str, Callable[[Arch, dict[str, Any]], Kernels]] = {
    "dense_decode": _dense_decode,
    "sparse_decode": _sparse_decode,
    "dense_prefill": _dense_prefill,
    "sparse_prefill": _sparse_prefill,
    SPARSE_BACKWARD: _sparse_prefill_backward,
    "mqa_logits": _mqa_logits,
    "indexer_topk": _indexer_topk,
    "topk_indices": _topk_indices,
    "head_sums": _head_sums,
    "indexer_backward": _indexer_backward,
}
