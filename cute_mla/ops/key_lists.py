"""key_lists and row_sums: which (token, slot) pairs name each key, and the sum of their rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import get_args

import torch

from ..runtime.device import Device
from ..spec.key_lists import MAX_ENTRIES, KeyListsArguments, KeyListsConfig, Step, blocks, grid
from ..spec.row_sums import RowSumsArguments, RowSumsConfig
from .tensor_spec import DTYPE_NAMES


@dataclass(frozen=True)
class IndexedKeys:
    """The indices of all tokens, and the keys that they name.

    indices: int32 [batch, s_q, topk]. topk_length: int32 [batch, s_q], or None. kv_offsets: int32 [batch + 1], or None. s_kv: rows of kv,
    or without kv_offsets of a request's.
    """

    indices: torch.Tensor
    topk_length: torch.Tensor | None
    kv_offsets: torch.Tensor | None
    s_kv: int

    @property
    def tokens(self) -> int:
        """Return the query tokens of all requests."""
        return self.indices.shape[0] * self.indices.shape[1]

    @property
    def topk(self) -> int:
        """Return the indices of a token."""
        return self.indices.shape[2]

    @property
    def request_keys(self) -> int:
        """Return the keys from a request's first one to the next request's: 0 where kv is packed."""
        return 0 if self.kv_offsets is not None else self.s_kv

    @property
    def keys(self) -> int:
        """Return the rows of kv over all requests."""
        return self.s_kv if self.kv_offsets is not None else self.indices.shape[0] * self.s_kv

    def chunks(self, tokens: int) -> Iterator[tuple[int, int]]:
        """Yield (first token, number of tokens) of chunks of at most so many tokens."""
        for first in range(0, self.tokens, tokens):
            yield first, min(tokens, self.tokens - first)

    def lists(self, device: Device, chunk: tuple[int, int]) -> KeyLists:
        """Launch the three steps over a chunk of tokens. ValueError if an entry would not be an int32."""
        (first, tokens), entries = chunk, chunk[1] * self.topk
        if entries > MAX_ENTRIES:
            raise ValueError(f"{tokens} tokens of {self.topk} indices; supported: to {MAX_ENTRIES} entries in a chunk")
        counters = self.indices.new_zeros(blocks(tokens) + 1, self.keys)
        lists = KeyLists(self.indices.new_empty(self.keys + 1), self.indices.new_empty(entries))
        if not entries or not self.keys:
            lists.row_starts.zero_()
            return lists
        device.mark_uninitialized(lists.row_starts, lists.entries)
        strides = self.indices.stride()
        args = KeyListsArguments(
            *(self.indices, self.topk_length, self.kv_offsets, counters, lists.row_starts, lists.entries),
            *(strides[0], strides[1], first, tokens, self.indices.shape[1], self.s_kv, self.request_keys, self.topk, self.keys),
        )
        for step in get_args(Step):
            kernel = device.kernel("key_lists", KeyListsConfig(step).name)
            device.launch(kernel, grid(step, tokens, self.keys), args, pdl=step != "count")
        return lists


@dataclass(frozen=True)
class KeyLists:
    """The lists of all keys, as spec/key_lists.py describes them. row_starts: int32 [keys + 1]. entries: int32 [tokens * topk]."""

    row_starts: torch.Tensor
    entries: torch.Tensor


@dataclass(frozen=True)
class RowSums:
    """Sums of rows over the lists of chunks of tokens, one chunk after the other.

    out: bf16 or fp32 [keys, columns], last dimension contiguous. sums: fp32 [keys, columns] contiguous, or None for one chunk. scale: of
    the sums in out. accumulate: whether they are added to out, which is fp32.
    """

    out: torch.Tensor
    sums: torch.Tensor | None
    scale: float
    accumulate: bool

    def add(self, device: Device, lists: KeyLists, rows: torch.Tensor, first: bool, last: bool) -> None:
        """Add the rows of a chunk, bf16 [tokens * topk, columns] contiguous. first, last: whether the chunk is."""
        keys, columns = self.out.shape
        if not keys:
            return
        args = RowSumsArguments(
            *(rows, lists.entries, lists.row_starts, self.sums, self.out, self.out.stride(0), self.scale),
            *(int(first), int(last), int(self.accumulate)),
        )
        config = RowSumsConfig(columns, DTYPE_NAMES[self.out.dtype])
        device.launch(device.kernel("row_sums", config.name), (keys, 1, 1), args, pdl=True)
