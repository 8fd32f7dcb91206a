"""Indices of every kind for tests of the backward of sparse prefill, and the lists that follow from them."""

from __future__ import annotations

import numpy as np
import torch

from cute_mla.ops.key_lists import IndexedKeys

INT_MIN = -(1 << 31)
NO_KEY = -1


def drawn(batch: int, s_q: int, topk: int, s_kv: int, seed: int = 0) -> torch.Tensor:
    """Draw indices int32 [batch, s_q, topk], different ones in each row, but for some that name no key."""
    draw = torch.Generator().manual_seed(seed)
    rows = [torch.randperm(max(s_kv, topk) + 3, generator=draw)[:topk] for _ in range(batch * s_q)]
    return torch.stack(rows).int().reshape(batch, s_q, topk)


def patterns() -> dict[str, IndexedKeys]:
    """Return calls by what is special about them."""
    plain, twice = drawn(2, 3, 63, 80), drawn(1, 17, 65, 40, 1) // 3
    odd = plain.clone()
    odd[0, 0, ::7], odd[1, 1, ::5], odd[1, 2] = NO_KEY, INT_MIN, 1 << 30
    lengths = torch.tensor([[0, -5, 1], [64, 1 << 30, 33]], dtype=torch.int32)
    offsets = torch.tensor([90, 20, 100], dtype=torch.int32)  # the first request has no row, the second one those of 20 .. 99
    shared = torch.tensor([0, 80, 60], dtype=torch.int32)
    return {
        "plain": IndexedKeys(plain, None, None, 80),
        "names no key": IndexedKeys(odd, None, None, 80),
        "lengths": IndexedKeys(plain, lengths, None, 80),
        "duplicates": IndexedKeys(twice, None, None, 13),
        "one key": IndexedKeys(torch.full((1, 19, 33), 5, dtype=torch.int32), None, None, 7),
        "packed": IndexedKeys(plain, None, offsets, 100),
        "negative range": IndexedKeys(plain, None, shared, 90),
        "two rounds": IndexedKeys(drawn(1, 2, 2050, 1100, 2) % 1500, None, None, 1100),
        "strided": IndexedKeys(drawn(2, 20, 9, 30)[:, ::2, 1:], None, None, 30),
        "no keys": IndexedKeys(plain, None, None, 0),
        "no slots": IndexedKeys(plain[:, :, :0], None, None, 5),
    }


def key_of_slots(call: IndexedKeys) -> np.ndarray:
    """Return the key that each slot names, int64 [tokens, topk], NO_KEY if none."""
    batch, s_q, topk = call.indices.shape
    indices = call.indices.numpy().astype(np.int64)
    count = np.full((batch, s_q), topk) if call.topk_length is None else call.topk_length.numpy().clip(0, topk)
    first, rows = np.arange(batch) * call.request_keys, np.full(batch, call.s_kv)
    if call.kv_offsets is not None:
        ends = call.kv_offsets.numpy().clip(0, call.s_kv)
        first, rows = ends[:-1], np.maximum(ends[1:] - ends[:-1], 0)
    seen = (np.arange(topk) < count[..., None]) & (indices >= 0) & (indices < rows[:, None, None])
    return np.where(seen, indices + first[:, None, None], NO_KEY).reshape(batch * s_q, topk)


def lists_of(call: IndexedKeys, chunk: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """Return (row_starts, entries) of a chunk of tokens."""
    keys = key_of_slots(call)[chunk[0] : sum(chunk)].reshape(-1)
    order = np.argsort(np.where(keys < 0, call.keys, keys), kind="stable")
    return np.searchsorted(keys[order[: (keys >= 0).sum()]], np.arange(call.keys + 1)), order[: (keys >= 0).sum()]
