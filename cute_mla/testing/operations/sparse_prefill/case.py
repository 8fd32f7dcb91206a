"""Cases of sparse prefill.

A case's seed determines its tensors, which probe what a kernel must not read: every row of kv that no used index names is NaN, and so is
the memory between and around rows. Indices beyond topk_length name rows like any other, but these rows hold no keys.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, pairwise
from typing import ClassVar, Literal

import torch
from torch import Tensor

from ....spec.arch import Arch
from ....spec.dense_decode import TILE_ROWS, TILINGS
from ....spec.mla import D_QK, ceil_div
from ....spec.sparse_prefill import HEAD_DIMS, SparsePrefillProblem
from ....spec.split_plan import TILE_KEYS
from ...cases import sparse_indices
from ...cases.base import DTYPES, TAGS, BatchedCase, Tags, Values
from ...cases.far import far_tensor
from ...cases.sparse_indices import INT_MAX, INT_MIN, IndexLayout, Indices, Lengths, Sinks
from ...cases.tensors import (
    ORDERED,
    Fp32Result,
    OutputBuffer,
    allocate_output_buffers,
    allocate_q,
    draw_queries,
    generator_for,
    nan_tensor,
    normal_values,
    ramp_keys,
)

MARGINS = (7, 4)  # rows of a ragged kv before the first request and after the last
AMPLIFIED = 2.0**8  # k_amplifier of FlashMLA's tests

PrefillValues = Literal[Values, "amplified"]
Form = Literal["single", "batched", "ragged", "clipped"]
KvLayout = Literal["packed", "padded_rows", "layers", "far"]


@dataclass(frozen=True)
class SparsePrefillCase(BatchedCase):
    """One call of sparse prefill.

    s_kv: rows of kv, per request; with form "ragged", of the longest request. topk: indices per token; indices beyond the number of
        rows are invalid.
    form: "single": no batch dimension; "batched": kv [b, s_kv]; "ragged": kv_offsets, the rows of all requests packed, none for the
        second request, and rows of no request before the first and after the last; "clipped": like "ragged", but the first offset
        is negative, the last lies beyond kv, and the second request ends before it begins.
    lengths: the topk_length of each token, as in draw_topk_lengths.
    values: as in DenseDecodeCase, along the rows of a request; indices of ORDERED values ascend; "amplified": one row in
        fifty is as large as with "normal" and AMPLIFIED times larger than all others. With a scale such as 64 the scores of the
        small rows are almost 0, and the running maximum jumps at each large row.
    kv_layout: "padded_rows": rows further apart than their length; "layers": one layer of several that lie side by side;
        "far": the last eighth of the rows lies FAR_ELEMENTS or more from the first.
    indices: as in draw_key_positions, with the values of invalid_indices; "mixed": and as in _with_first_and_gaps.
    index_layout: as in lay_out_indices. sinks: as in draw_sinks.
    indexer_topk: the first indices, of which lse_indexer is asked for; 0: it is not.
    """

    op: ClassVar[str] = "sparse_prefill"
    cut_by: ClassVar[str] = "s_q"
    head_dims: ClassVar[tuple[int, ...]] = HEAD_DIMS
    tags: ClassVar[Tags] = {
        "form": str,
        "lengths": lambda lengths: f"len_{sparse_indices.lengths_tag(lengths)}",
        "indices": lambda indices: f"idx_{indices}",
        "sinks": lambda sinks: f"sinks_{sinks}",
        "index_layout": lambda layout: f"idx_{layout}",
        "kv_layout": lambda layout: f"kv_{layout}",
        "indexer_topk": lambda count: f"indexer_{count}",
        **TAGS,
    }

    d_qk: int = D_QK
    s_kv: int = 512
    topk: int = 64
    form: Form = "single"
    lengths: Lengths | None = None
    values: PrefillValues = "normal"
    kv_layout: KvLayout = "packed"
    indices: Indices = "valid"
    index_layout: IndexLayout = "packed"
    sinks: Sinks = "none"
    indexer_topk: int = 0

    def __post_init__(self) -> None:
        if self.d_qk not in self.head_dims:
            raise ValueError(f"d_qk is {self.d_qk}; supported: {self.head_dims}")
        if self.form == "single" and self.batch != 1:
            raise ValueError(f"batch is {self.batch} with form 'single'; supported: 1")
        if isinstance(self.lengths, tuple) and len(self.lengths) != self.tokens:
            raise ValueError(f"lengths: got {len(self.lengths)} for {self.tokens} tokens")
        if not 0 <= self.indexer_topk <= self.topk:
            raise ValueError(f"indexer_topk is {self.indexer_topk}; supported: 0 to topk, {self.topk}")

    @property
    def shape_id(self) -> str:
        """Return the first part of the id."""
        return f"{self.dtype}-d{self.d_qk}-b{self.batch}-q{self.s_q}-k{self.s_kv}t{self.topk}-h{self.h_q}"

    @property
    def tokens(self) -> int:
        """Return the query tokens of all requests."""
        return self.batch * self.s_q

    @cached_property
    def topk_lengths(self) -> tuple[int, ...] | None:
        """Return the topk_length argument, one length per token, or None."""
        return sparse_indices.draw_topk_lengths(self.lengths, self.tokens, self.topk, f"{self.seed} {self.tokens} {self.topk}")

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """Return how many indices the kernel uses per token."""
        return sparse_indices.clip_topk_lengths(self.topk_lengths, self.tokens, self.topk)

    @cached_property
    def request_lengths(self) -> tuple[int, ...]:
        """Return the rows that kv holds for each request."""
        if self.form in ("single", "batched"):
            return (self.s_kv,) * self.batch
        draw = random.Random(f"{self.seed} {self.batch} {self.s_kv}")
        drawn = [self.s_kv, 0, *(draw.randint(1, max(self.s_kv, 1)) for _ in range(self.batch))]
        return tuple(drawn[: self.batch])

    @property
    def kv_rows(self) -> int:
        """Return the rows of kv."""
        return sum(self.request_lengths) + (0 if self.form in ("single", "batched") else sum(MARGINS))

    @cached_property
    def offsets(self) -> tuple[int, ...] | None:
        """Return the kv_offsets argument, or None."""
        if self.form in ("single", "batched"):
            return None
        offsets = list(accumulate(self.request_lengths, initial=MARGINS[0]))
        if self.form == "clipped":
            if self.batch > 2:
                offsets[2] -= 3
            offsets[0], offsets[-1] = -5, 1 << 30
        return tuple(offsets)

    @cached_property
    def row_ranges(self) -> tuple[tuple[int, int], ...]:
        """Return for each request its first row in kv, counted over the rows of all requests, and its number of rows."""
        if self.offsets is None:
            return tuple((request * self.s_kv, self.s_kv) for request in range(self.batch))
        bounds = [min(max(offset, 0), self.kv_rows) for offset in self.offsets]
        return tuple((first, max(end - first, 0)) for first, end in pairwise(bounds))

    def invalid_indices(self, request: int) -> tuple[int, ...]:
        """Return indices that name no row of a request: those of FlashMLA's tests, and a neighbour's row or the first or last row of kv."""
        first, rows = self.row_ranges[request]
        others = (min(-first, -1), max(self.kv_rows - 1 - first, rows))
        return -1, INT_MIN, -123456, rows, rows + 1, 114514, 1919810, 2_147_480_000, INT_MAX, *others

    def row_bytes(self, arch: Arch) -> int:
        """Return the number of bytes at multiples of which rows of q and out must begin."""
        return TILINGS[arch.name].row_bytes

    def problem(self, arch: Arch) -> SparsePrefillProblem:
        """Return the shapes of the call."""
        return SparsePrefillProblem(
            arch=arch,
            dtype=self.dtype,
            d_qk=self.d_qk,
            batch=self.batch,
            s_q=self.s_q,
            h_q=self.h_q,
        )

    @property
    def tiles(self) -> int:
        """Return the cost on the simulated device: tiles of 64 query rows x 64 keys; a token without keys costs one key tile."""
        return sum(max(ceil_div(count, TILE_KEYS), 1) for count in self.counts) * ceil_div(self.h_q, TILE_ROWS)


@dataclass(frozen=True)
class SparsePrefillTensors:
    """The operands of a case; the call omits operands that are None.

    q dtype [b, s_q, h_q, d_qk]; kv dtype [b, s_kv, 1, d_qk], with kv_offsets [kv_rows, 1, d_qk]; indices int32
    [b, s_q, 1, topk]; topk_length int32 [b, s_q]; attn_sink fp32 [h_q]; kv_offsets int32 [b + 1]. output_buffers: out dtype
    [b, s_q, h_q, 512], max_logits, lse and, with indexer_topk, lse_indexer fp32 [b, s_q, h_q]. Tensors of form "single" have no
    dimension b.
    """

    q: Tensor
    kv: Tensor
    indices: Tensor
    topk_length: Tensor | None = None
    attn_sink: Tensor | None = None
    kv_offsets: Tensor | None = None
    output_buffers: Mapping[str, OutputBuffer] = field(default_factory=dict)


def make_sparse_prefill_tensors(case: SparsePrefillCase, device: str | torch.device = "cpu") -> SparsePrefillTensors:
    """Make the operands of a case: equal for equal cases, and on every device if none exceeds 2^25 elements."""
    device = torch.device(device)
    indices, named = _indices(case)
    kv = _kv(case, named.to(device))
    lengths = None if case.topk_lengths is None else _int32(case.topk_lengths, device).view(case.batch, case.s_q)
    return SparsePrefillTensors(
        q=as_called(case, _q(case, device)),
        kv=as_called(case, kv.unflatten(0, (case.batch, case.s_kv)) if case.offsets is None else kv),
        indices=as_called(case, sparse_indices.lay_out_indices(indices, case.index_layout, device)).unsqueeze(-2),
        topk_length=None if lengths is None else as_called(case, lengths),
        attn_sink=sparse_indices.draw_sinks(case.sinks, case.h_q, case.seed, device),
        kv_offsets=None if case.offsets is None else _int32(case.offsets, device),
        output_buffers=_output_buffers(case, device),
    )


def as_called(case: SparsePrefillCase, tensor: Tensor) -> Tensor:
    """Drop the batch dimension of a tensor [b, ..] if the case's form has none."""
    return tensor[0] if case.form == "single" else tensor


def _int32(values: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def _output_buffers(case: SparsePrefillCase, device: torch.device) -> dict[str, OutputBuffer]:
    shape = (case.batch, case.s_q, case.h_q)
    fp32 = {"max_logits": Fp32Result(shape, 1, 2), "lse": Fp32Result(shape, 2, 2)}
    if case.indexer_topk:
        fp32["lse_indexer"] = Fp32Result(shape, 1, 2)
    return allocate_output_buffers(case, device, fp32, drop_batch=case.form == "single")


def _q(case: SparsePrefillCase, device: torch.device) -> Tensor:
    q = allocate_q(case, device)
    return q.copy_(draw_queries(case.values, case.q_shape, generator_for(case, q.numel(), device)))


def _indices(case: SparsePrefillCase) -> tuple[Tensor, Tensor]:
    """Draw indices int32 [b, s_q, topk], and mark the rows of kv that used indices name, bool [kv_rows]."""
    draw = torch.Generator().manual_seed(case.seed + 10)
    indices = torch.empty(case.batch, case.s_q, case.topk, dtype=torch.int32)
    named = torch.zeros(case.kv_rows, dtype=torch.bool)
    ordered = case.values in ORDERED
    for request, (first, rows) in enumerate(case.row_ranges):
        invalid = case.invalid_indices(request)
        for place in range(case.s_q):
            token = request * case.s_q + place
            keys = sparse_indices.draw_key_positions(case.indices, token, rows, case.topk, ordered=ordered, kinds=len(invalid), draw=draw)
            if case.indices == "mixed":
                keys = _with_first_and_gaps(keys, token, len(invalid))
            indices[request, place] = sparse_indices.encode_indices(keys, torch.arange(rows), invalid)
            used = keys[: case.counts[token]]
            named[first + used[used >= 0]] = True
    return indices, named


def _with_first_and_gaps(keys: Tensor, token: int, kinds: int) -> Tensor:
    """Return keys as in draw_key_positions, of which every ninth is the first one of the request, if it was valid.

    Of tokens 0, 4, 5, 9, .. every second key is invalid, in neighbouring tiles alternating ones: of two keys one counts.
    """
    place = torch.arange(len(keys))
    keys = torch.where((place % 9 == 0) & (keys >= 0), 0, keys)
    if token % 5 in (0, 4):
        keys = torch.where((place + place // TILE_KEYS) % 2 == 0, -1 - place % kinds, keys)
    return keys


def _kv(case: SparsePrefillCase, named: Tensor) -> Tensor:
    """Make kv [kv_rows, 1, d_qk] in its layout, the rows of all requests packed; rows that no index names are NaN."""
    generator = generator_for(case, case.kv_rows * case.d_qk, named.device, 11)
    rows = normal_values((case.kv_rows, case.d_qk), generator)
    if case.values == "amplified":
        small = torch.rand(case.kv_rows, 1, generator=generator, device=rows.device) >= 0.02
        rows = torch.where(small, rows / AMPLIFIED, rows)
    elif case.values != "normal":
        for first, count in case.row_ranges:
            ramp_keys(case.values, rows[first : first + count], count, generator)
    kv = _kv_storage(case, named.device)
    kv.fill_(float("nan"))
    kv[named, 0] = rows.to(named.device)[named].to(kv)
    return kv


def _kv_storage(case: SparsePrefillCase, device: torch.device) -> Tensor:
    """Allocate kv [kv_rows, 1, d_qk] in its layout, with NaN in it and, in all layouts but "far", around it."""
    rows, d_qk, dtype = case.kv_rows, case.d_qk, DTYPES[case.dtype]
    match case.kv_layout:
        case "packed":
            return nan_tensor((rows, 1, d_qk), dtype, device)
        case "padded_rows":
            return nan_tensor((rows, 1, d_qk + 64), dtype, device)[..., :d_qk]
        case "layers":
            return nan_tensor((rows, 3, 1, d_qk), dtype, device)[:, 1]
        case "far":
            return far_tensor((rows, 1, d_qk), 0, dtype, device, rows * 7 // 8)
