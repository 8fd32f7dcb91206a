"""key_lists and row_sums: which (token, slot) pairs name each key, and the sum of their rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, get_args

import torch

from ..runtime.current import device_for
from ..runtime.device import Device
from ..spec.key_lists import BLOCK_TOKENS, MAX_ENTRIES, KeyListsArguments, KeyListsConfig, Step, blocks, grid
from ..spec.mla import ceil_div
from ..spec.row_sums import RowSumsArguments, RowSumsConfig
from .arguments import check_integer, short_repr
from .indices import check_indices
from .paged_cache import MAX_SLOTS
from .tensor_spec import DTYPE_NAMES, TensorSpec, check_contiguous, check_counts, check_device, check_dtype, check_shape, operand_spec

DEFAULT_WORKSPACE = 4 << 30  # bytes that chunks may take
FLOAT_BYTES = INT_BYTES = 4
CHUNK_TOKENS = 1024  # of a plan: 128 heads and 2,048 indices of so many tokens take 3.4 GB between the kernels of a backward pass


class Entries(NamedTuple):
    """Sizes of a call: query tokens and rows of keys of all requests, and indices of a token."""

    tokens: int
    topk: int
    keys: int

    def chunk_tokens(self, token_bytes: int, columns: int, room: int) -> int:
        """Return the tokens of a chunk, at least 1: as many as have room. token_bytes: beside lists. columns: of the sums of a key."""
        token = token_bytes + self.topk * INT_BYTES + ceil_div(self.keys * INT_BYTES, BLOCK_TOKENS)
        fixed = self.keys * (columns * FLOAT_BYTES + 3 * INT_BYTES)
        most = min(max(self.tokens, 1), MAX_ENTRIES // max(self.topk, 1))
        return max(min((room - fixed) // max(token, 1), most), 1)


@dataclass(frozen=True)
class IndexedKeys:
    """The indices of all tokens, and the keys that they name.

    indices: int32 [batch, s_q, topk]. topk_length: int32 [batch, s_q], or None. kv_offsets: int32 [batch + 1], or None. s_kv: rows of kv,
    or without kv_offsets of a request's. plan: the lists, if they have been made.
    """

    indices: torch.Tensor
    topk_length: torch.Tensor | None
    kv_offsets: torch.Tensor | None
    s_kv: int
    plan: KeyPlan | None = None

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

    def chunk_lists(self, device: Device, number: int, chunk: tuple[int, int]) -> KeyLists:
        """Return the lists of a chunk of tokens: those of the plan, or new ones."""
        return self.lists(device, chunk) if self.plan is None else self.plan.of_chunk(number, chunk)

    def lists(self, device: Device, chunk: tuple[int, int], lists: KeyLists | None = None) -> KeyLists:
        """Launch the three steps over a chunk of tokens. ValueError if an entry would not be an int32. lists: where they go."""
        (first, tokens), entries = chunk, chunk[1] * self.topk
        if entries > MAX_ENTRIES:
            raise ValueError(f"{tokens} tokens of {self.topk} indices; supported: to {MAX_ENTRIES} entries in a chunk")
        counters = self.indices.new_zeros(blocks(tokens) + 1, self.keys)
        if lists is None:
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


class KeyPlan(NamedTuple):
    """The lists of all chunks of a call, which calls with the same indices share.

    row_starts: int32 [chunks, keys + 1], of a chunk of ceil(tokens / chunks) tokens each. entries: int32 [tokens, topk].
    """

    row_starts: torch.Tensor
    entries: torch.Tensor

    @staticmethod
    def create(device: Device, indexed: IndexedKeys, chunk_tokens: int) -> KeyPlan:
        """Launch the steps over chunks of at most so many tokens."""
        indices, chunks = indexed.indices, max(ceil_div(indexed.tokens, chunk_tokens), 1)
        plan = KeyPlan(indices.new_empty(chunks, indexed.keys + 1), indices.new_empty(indexed.tokens, indexed.topk))
        if not indexed.tokens:
            plan.row_starts.zero_()
        for number, chunk in enumerate(indexed.chunks(ceil_div(max(indexed.tokens, 1), chunks))):
            indexed.lists(device, chunk, plan.of_chunk(number, chunk))
        return plan

    @staticmethod
    def given(plan: Any) -> KeyPlan | None:
        """Return the argument of a call. ValueError unless it is None or two tensors."""
        if plan is None:
            return None
        if not isinstance(plan, tuple | list) or len(plan) != len(KeyPlan._fields):
            raise ValueError(f"key_plan is {short_repr(plan)}; supported: None, and what plan_sparse_backward returns")
        return KeyPlan(*plan)

    def of_chunk(self, number: int, chunk: tuple[int, int]) -> KeyLists:
        """Return the lists of a chunk: (its first token, its tokens)."""
        return KeyLists(self.row_starts[number], self.entries[chunk[0] : sum(chunk)].flatten())

    def specs(self) -> tuple[TensorSpec, ...]:
        """Return the specs of the tensors."""
        return tuple(operand_spec(f"key_plan.{name}", tensor) for name, tensor in self._asdict().items())


def run_plan(
    indices: torch.Tensor,
    s_kv: int,
    topk_length: torch.Tensor | None = None,
    *,
    kv_offsets: torch.Tensor | None = None,
    chunk_tokens: int = CHUNK_TOKENS,
) -> tuple[torch.Tensor, torch.Tensor]:
    """List the slots that name each key, with the arguments of api.flashmla.plan_sparse_backward."""
    spec = operand_spec("indices", indices)
    if len(spec.shape) not in (3, 4):
        raise ValueError(f"indices has shape {list(spec.shape)}; supported: [s_q, 1, topk] or [batch, s_q, 1, topk]")
    check_indices("indices", spec, (*spec.shape[:-2], 1, "topk"), spec)
    if topk_length is not None:
        check_counts("topk_length", operand_spec("topk_length", topk_length), spec.shape[:-2], spec.device, "indices")
    if kv_offsets is not None:
        if len(spec.shape) == 3:
            raise ValueError(f"kv_offsets is given with indices of shape {list(spec.shape)}; supported: with [batch, s_q, 1, topk]")
        check_counts("kv_offsets", operand_spec("kv_offsets", kv_offsets), (spec.shape[0] + 1,), spec.device, "indices")
    rows, chunk = check_integer("s_kv", s_kv, 0, MAX_SLOTS), check_integer("chunk_tokens", chunk_tokens, 1)
    plain = indices.squeeze(-2)
    if plain.dim() == 2:
        plain, topk_length = plain.unsqueeze(0), None if topk_length is None else topk_length.unsqueeze(0)
    plan = KeyPlan.create(device_for(indices.device, "sparse_prefill_backward"), IndexedKeys(plain, topk_length, kv_offsets, rows), chunk)
    return plan.row_starts, plan.entries


def planned_tokens(plan: tuple[TensorSpec, ...], call: Entries, device: torch.device) -> int:
    """Return the tokens of a chunk. ValueError unless the plan has the sizes of a call."""
    shapes: tuple[tuple[int | str, ...], ...] = (("chunks", call.keys + 1), (call.tokens, call.topk))
    for name, spec, shape in zip(KeyPlan._fields, plan, shapes, strict=True):
        check_shape(f"key_plan.{name}", spec, shape)
        check_dtype(f"key_plan.{name}", spec, torch.int32)
        check_device(f"key_plan.{name}", spec, device)
        check_contiguous(f"key_plan.{name}", spec)
    chunks = max(plan[0].shape[0], 1)
    tokens = max(ceil_div(call.tokens, chunks), 1)
    if call.tokens and ceil_div(call.tokens, tokens) != plan[0].shape[0]:
        raise ValueError(
            f"key_plan.row_starts has {plan[0].shape[0]} chunks of {call.tokens} tokens; supported: as plan_sparse_backward returns it"
        )
    return tokens


def check_accumulated(name: str, given: TensorSpec | None, operand: TensorSpec, accumulate: bool) -> None:
    """Raise ValueError unless the gradient of keys is None, or a tensor that sums can be written to, or in fp32 added to."""
    if given is None:
        if accumulate:
            raise ValueError(f"{name} is None with {name}_accumulate; supported: a tensor in fp32, to add to")
        return
    check_shape(name, given, operand.shape)
    check_dtype(name, given, *((torch.float32,) if accumulate else (operand.dtype, torch.float32)))
    check_device(name, given, operand.device)
    check_contiguous(name, given)


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
