"""Ranges of what a launch sets: scalar parameters, as the host checks them, and special registers."""

from __future__ import annotations

from cute_mla.manifest import KernelEntry
from cute_mla.simulator.frontend.ptx import EntryText
from cute_mla.spec import (
    cache_gather,
    cache_insert,
    cache_write,
    combine,
    dense_decode,
    dense_prefill,
    dense_prefill_dkdv,
    dense_prefill_dq,
    index_write,
    masked_prefill,
    merge_states,
    mqa_logits,
    sparse_decode,
    sparse_prefill,
    split_plan,
    topk_indices,
)
from cute_mla.spec.abi import ParamKind
from cute_mla.spec.cache_rows import KEYS_PER_BLOCK
from tests.mutation.ranges import Range

_MODULES = (
    *(cache_gather, cache_insert, cache_write, combine, dense_decode, dense_prefill, dense_prefill_dkdv, dense_prefill_dq),
    *(index_write, masked_prefill, merge_states, mqa_logits, sparse_decode, sparse_prefill, split_plan, topk_indices),
)
_PARAMS = {module.__name__.rpartition(".")[2]: module.PARAMS for module in _MODULES}
_MOST = (1 << 31) - 1
_COUNT = (0, _MOST)  # sizes of tensors, and what is computed of them; neither they nor strides are negative
_KINDS = {ParamKind.INT32: _COUNT, ParamKind.INT64: (0, 1 << 62), ParamKind.POINTER: (0, 1 << 57)}
_HEADS_OF_LATENT = 128  # most query heads of the ops over the latent
_TOKENS = {"dense_decode": (1 << 24) - 1, "sparse_decode": 65535}  # of a request (docs/support.md); 2^24 of 128 heads are 2 TB of out
_REQUESTS = (1 << 29) - 1  # most requests of a decode call: each has a row of q and of out, 1600 bytes, in at most 512 GB of memory
_TILE_ROWS = 64  # query rows of a CTA of dense decode
_BLOCKS = {  # most CTAs in x
    "cache_gather": _MOST // KEYS_PER_BLOCK + 1,
    "cache_insert": _MOST // KEYS_PER_BLOCK + 1 + cache_insert.MAX_QUERIES // cache_insert.WARPS,
    "cache_write": _MOST // KEYS_PER_BLOCK + 1,
    "dense_decode": _TOKENS["dense_decode"] * _HEADS_OF_LATENT // _TILE_ROWS,
    "index_write": index_write.MAX_ROWS // index_write.ROWS_PER_BLOCK,
    "sparse_decode": _HEADS_OF_LATENT // _TILE_ROWS,
}
MOST_CTAS = 16  # of a cluster
_FLAGS = (
    *("aligned", "causal", "wide_slots", "power_of_two", "length_per_token", "relative", "clean"),
    *("wide_positions", "wide_weights", "half_split", "hadamard", "exponents"),
)
_POSITIVE = (
    "s_q",
    "h_q",
    "heads_per_kv",
    "page_size",
    "states",
    "heads",
    "tokens_per_request",
    "chunk",
)  # a call without rows or keys is not launched


def bounds(kernel: KernelEntry, entry: EntryText) -> dict[str, Range]:
    """Return the ranges of an entry's parameters by name, and of its special registers with a percent sign."""
    found: dict[str, Range] = {}
    for declared, param in zip(entry.params, _PARAMS[kernel.op], strict=True):
        if param.kind in _KINDS:
            found[declared.name] = _parameter(kernel.op, param.name, _KINDS[param.kind])
    threads = entry.reqntid or (1024, 1024, 64)
    blocks = _BLOCKS.get(kernel.op, _MOST)
    for axis, count, most in zip("xyz", threads, (blocks, 65535, 65535), strict=True):
        found |= {f"%tid.{axis}": (0, count - 1), f"%ntid.{axis}": (1, count)}
        found |= {f"%ctaid.{axis}": (0, most - 1), f"%nctaid.{axis}": (1, most)}
    found |= {"%laneid": (0, 31), "%cluster_ctarank": (0, MOST_CTAS - 1), "%cluster_nctarank": (1, MOST_CTAS)}
    return found


def parameter_names(kernel: KernelEntry, entry: EntryText) -> dict[str, str]:
    """Return the names of an entry's parameters in the spec, by their names in PTX."""
    return {declared.name: param.name for declared, param in zip(entry.params, _PARAMS[kernel.op], strict=True)}


def _parameter(op: str, name: str, general: Range) -> Range:
    if name in _FLAGS:
        return 0, 1
    if name in ("h_q", "heads_per_kv") and not op.startswith(("dense_prefill", "masked_prefill")):
        return 1, _HEADS_OF_LATENT
    if name == "batch" and op in (*_TOKENS, "combine"):
        return 0, _REQUESTS
    if name == "s_q" and op in _TOKENS:
        return 1, _TOKENS[op]
    return (1, general[1]) if name in _POSITIVE else general
