"""workspace_size: the bytes of workspace that a decode call needs."""

from __future__ import annotations

from typing import Any

import torch

from ..ops.arguments import check_flag, check_integer, is_integer, short_repr
from ..ops.decode_plan import accumulator_bytes
from ..ops.limits import check_op, heads_error
from ..runtime.current import default_device, device_for
from ..spec.dense_decode import num_parts
from ..spec.split_plan import accumulator_rows, invariant_splits


def workspace_size(
    op: str,
    *,
    batch: int,
    s_q: int,
    h_q: int,
    h_kv: int = 1,
    batch_invariant: bool = False,
    max_cache_seqlen: int | None = None,
    topk: int | None = None,
    device: torch.device | str | int | None = None,
) -> int:
    """Return the bytes of workspace that a decode call needs. They depend on its shapes and the device, never on lengths.

    op: "dense_decode" or "sparse_decode"; "dense_prefill" and "sparse_prefill" need none. batch, s_q, h_q, h_kv: as in the call.
    batch_invariant: as in the call; then max_cache_seqlen, block_table.shape[1] * page size, is needed too in dense decode.
    topk: in sparse decode, indices of a token in both caches together, indices.shape[2] + extra_indices_in_kvcache.shape[2];
    needed with batch_invariant.
    device: where the call runs; "cpu" inside cute_mla.simulate(). Default: the simulated device inside cute_mla.simulate(), else the
    current CUDA device.

    Raises ValueError on bad arguments, ArtifactError and DeviceError if the device cannot be used, DeviceError also without a GPU.
    """
    check_op(op)
    check_flag("batch_invariant", batch_invariant)
    batch, s_q = check_integer("batch", batch, 0), check_integer("s_q", s_q, 0)
    error = heads_error(h_q, h_kv, op)
    if error is not None:
        raise ValueError(error)
    max_keys = _max_keys(op, batch_invariant, max_cache_seqlen, topk)
    found = device_for(_torch_device(device))
    if batch == 0 or s_q == 0 or op in ("dense_prefill", "sparse_prefill"):
        return 0
    rows, columns = (h_q, s_q) if op == "sparse_decode" else (s_q * (h_q // h_kv), h_kv)
    parts = num_parts(found.arch, rows, columns, found.sm_count)
    max_splits = invariant_splits(max_keys) if batch_invariant else 0
    return sum(accumulator_bytes(accumulator_rows(batch, parts, max_splits), s_q, h_q))


def _torch_device(device: Any) -> torch.device:
    """Return the torch device. ValueError unless torch has such a device."""
    if device is None:
        return default_device()
    try:
        return torch.device("cuda", device) if is_integer(device) else torch.device(device)
    except (RuntimeError, TypeError, ValueError, OverflowError):
        message = f"device is {short_repr(device)}; supported: a CUDA device, and cpu inside `with cute_mla.simulate(arch):`"
        raise ValueError(message) from None


def _max_keys(op: str, batch_invariant: bool, max_cache_seqlen: int | None, topk: int | None) -> int:
    """Return the bound on a request's keys, 0 where none is needed. ValueError if a needed bound is missing, or given without need."""
    dense = op == "dense_decode"
    if op in ("dense_decode", "dense_prefill") and topk is not None:
        raise ValueError(f"topk is {short_repr(topk)}; supported with {op}: None")
    if not dense and max_cache_seqlen is not None:
        raise ValueError(f"max_cache_seqlen is {short_repr(max_cache_seqlen)}; supported with {op}: None")
    if dense and batch_invariant != (max_cache_seqlen is not None):
        raise ValueError(
            f"batch_invariant is {batch_invariant} and max_cache_seqlen {short_repr(max_cache_seqlen)}; supported: "
            "max_cache_seqlen (block_table.shape[1] * page size) with batch_invariant=True, and neither"
        )
    if op == "sparse_decode" and batch_invariant and topk is None:
        raise ValueError("batch_invariant is True and topk None; supported: topk (of both caches together) with batch_invariant=True")
    name, keys = ("max_cache_seqlen", max_cache_seqlen) if dense else ("topk", topk)
    return 0 if keys is None else check_integer(name, keys, 0)
