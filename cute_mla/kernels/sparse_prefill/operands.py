"""The operands of the sparse prefill kernels: where a query row lies in each of them, and where the rows lie that an index names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Boolean, Int32, Int64, Uint32, cute
from cutlass.cute.typing import AddressSpace

from ...spec.mla import ELEMENT_BYTES
from ..attention.scheduler import LatentOperands, TokenSchedule
from ..primitives.arithmetic import clip, larger
from ..primitives.rows import load_or

NO_ROW = -1


@dataclass(frozen=True)
class Latent:
    """The rows that indices name. Strides in bytes, multiples of 16, as is the address."""

    base: cute.Pointer
    offsets: cute.Pointer  # int32 [batch + 1], or null: every request has the rows 0 .. s_kv - 1
    batch_stride: Int64
    row_stride: Int64
    s_kv: Int32

    def rows_of(self, req: Int32) -> tuple[Int32, Int32]:
        """Return (first row, number of rows) of a request, within 0 .. s_kv whatever the offsets are."""
        first = clip(load_or(self.offsets, req, Int32(0)), self.s_kv)
        end = clip(load_or(self.offsets, req + 1, self.s_kv), self.s_kv)
        return first, larger(end - first, Int32(0))


@dataclass(frozen=True)
class SparsePrefillIndices:
    """The indices of one query token that count, and what they are counted from.

    indices: the first one. count: how many. base: address of the request's first row. rows: of the request.
    """

    indices: cute.Pointer
    count: Int32
    base: Int64
    rows: Int32
    row_stride: Int64

    def look_up(self, position: Int32) -> Int32:
        """Return the index at a position of the list, NO_ROW past its end, where nothing is read, and for one that names no row."""
        return self.checked(self.entry(position))

    def entry(self, position: Int32) -> Int32:
        """Return the entry at a position of the list, NO_ROW past its end, where nothing is read."""
        return entry_before(self.indices, position, self.count)

    def checked(self, index: Int32) -> Int32:
        """Return an index, NO_ROW for one that names no row."""
        return cutlass.select_(Uint32(index) < Uint32(self.rows), index, Int32(NO_ROW))

    def row_address(self, index: Int32) -> Int64:
        """Return the address of a row as a number, 0 for NO_ROW."""
        return cutlass.select_(index >= 0, self.base + Int64(index) * self.row_stride, Int64(0))


@cute.jit
def entry_before(entries: cute.Pointer, position: Int32, count: Int32) -> Int32:
    """Return an entry of a list of so many, NO_ROW outside of it."""
    index = Int32(NO_ROW)
    if Uint32(position) < Uint32(count):
        index = (entries + position).load()
    return index


@dataclass(frozen=True)
class SparsePrefillOperands(LatentOperands):
    """The arguments by meaning. A query token counts over the batch: request * s_q + place.

    args: SparsePrefillArguments, or those of a kernel of the backward.
    """

    args: Any
    latent: Latent
    schedule: TokenSchedule

    def q_rows(self, token: Int32) -> tuple[Int64, Int64]:
        """Return (address of element 0 of a token's first query row, bytes from row to row)."""
        return Int64(self.q_row(token, Int32(0)).toint()), self.args.q_stride_head * ELEMENT_BYTES

    def max_logit_of(self, token: Int32, row: Int32) -> cute.Pointer:
        """Return the maximum logit of a query row."""
        return self.element("max_logits", token, row)

    def asks_lse_indexer(self) -> Boolean:
        """Return whether the lse of a token's first indexer_topk indices is a result too."""
        return self.args.lse_indexer.toint() != 0

    def lse_indexer_of(self, token: Int32, row: Int32) -> cute.Pointer:
        """Return the lse of a query row over the first indexer_topk indices."""
        return self.element("lse_indexer", token, row)

    def index_list(self, token: Int32) -> SparsePrefillIndices:
        """Return the indices of a query token."""
        req, place = self._request(token)
        first, rows = self.latent.rows_of(req)
        indices = self.args.indices + (Int64(req) * self.args.indices_stride_batch + Int64(place) * self.args.indices_stride_token)
        base = Int64(self.latent.base.toint()) + Int64(req) * self.latent.batch_stride + Int64(first) * self.latent.row_stride
        return SparsePrefillIndices(indices, self.schedule.keys(token), base, rows, self.latent.row_stride)

    def _request(self, token: Int32) -> tuple[Int32, Int32]:
        """Return (request, place among its tokens)."""
        req = Int32(Uint32(token) // Uint32(self.args.s_q))
        return req, token - req * self.args.s_q

    def _offset(self, strides: tuple[Int64, Int64, Int64], req: Int32, row: Int32, *_: Int32) -> Int64:
        request, place = self._request(req)
        return Int64(request) * strides[0] + Int64(place) * strides[1] + Int64(row) * strides[2]


def chunk_operands(args: Any, request_keys: Int32 | int = 0) -> SparsePrefillOperands:
    """Return the operands of a kernel that takes a chunk of tokens and reads their indices alone, not the latent.

    args: with the indices, lengths and offsets of SparsePrefillArguments, and first_token and tokens of the chunk. A row's address is then
    its number among those of all requests, which lie request_keys apart.
    """
    nowhere = cute.make_ptr(Int32, Int64(0), AddressSpace.gmem, assumed_align=4)
    latent = Latent(nowhere, args.kv_offsets, Int64(request_keys), Int64(1), args.s_kv)
    schedule = TokenSchedule(args.topk_length, args.topk, args.first_token + args.tokens, args.first_token)
    return SparsePrefillOperands(args, latent, schedule)
