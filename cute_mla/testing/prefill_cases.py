"""Sparse prefill: a SparsePrefillCase is one call in all its particulars; and the tensors made for it.

Tensors come from the case's seed, with nasty values on purpose: every row of kv that no index which counts names is NaN, and
so is whatever lies between and around rows. Indices beyond a length name rows like any other, but nobody fills them.
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

from ..spec.arch import Arch
from ..spec.dense_decode import TILE_ROWS
from ..spec.mla import D_QK, D_ROPE, ceil_div
from ..spec.sparse_prefill import HEAD_DIMS, SparsePrefillProblem
from ..spec.split_plan import TILE_KEYS
from .case import (
    DTYPES,
    STEEP,
    TAGS,
    BatchedCase,
    Given,
    Tags,
    generator_for,
    given_fp32,
    given_out,
    levels,
    nan_tensor,
    normal,
    q_storage,
    signs,
)
from .indexed import (
    FAR_BYTES,
    INT_MAX,
    INT_MIN,
    IndexLayout,
    Indices,
    Lengths,
    Sinks,
    counted,
    drawn_sinks,
    index_values,
    laid_out,
    lengths_tag,
    named_keys,
    told_lengths,
)

MARGINS = (7, 4)  # rows of a ragged kv before the first request and after the last
AMPLIFIED = 2.0**8  # FlashMLA's k_amplifier

PrefillValues = Literal["normal", "rising", "falling", "peaks", "amplified"]
Form = Literal["single", "batched", "ragged", "clipped"]
KvLayout = Literal["packed", "padded_rows", "layers", "far"]


@dataclass(frozen=True)
class SparsePrefillCase(BatchedCase):
    """One call of sparse prefill.

    s_kv: rows of kv, or of each request; ragged, of the longest. topk: indices of each token; beyond the rows that there are,
        they are invalid.
    form: "single": no batch dimension; "batched": kv [b, s_kv]; "ragged": the requests' rows one behind the other, the second
        request having none, and rows of nobody in front and behind; "clipped": so, but the first offset is negative, the last
        beyond kv, and the second request ends before it begins.
    lengths: of tokens, as told_lengths has them.
    values: as in Case, along the rows of a request, which rising and falling indices then name in order; "amplified": of every
        fifty rows one is AMPLIFIED times larger than the others, and as large as those of "normal": scores of the rest are
        all but 0, so that the maximum moves by far wherever one of these turns up, given a scale such as 64.
    kv_layout: "padded_rows": rows further apart than they are long; "layers": one layer of several that lie side by side;
        "far": the last eighth of the rows lies beyond 2^32 bytes.
    indices, index_layout, sinks: as named_keys, laid_out and drawn_sinks have them; see invalid_indices.
    """

    op: ClassVar[str] = "sparse_prefill"
    cut_by: ClassVar[str] = "s_q"
    tags: ClassVar[Tags] = {
        "form": str,
        "lengths": lambda lengths: f"len_{lengths_tag(lengths)}",
        "indices": lambda indices: f"idx_{indices}",
        "sinks": lambda sinks: f"sinks_{sinks}",
        "index_layout": lambda layout: f"idx_{layout}",
        "kv_layout": lambda layout: f"kv_{layout}",
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

    def __post_init__(self) -> None:
        if self.d_qk not in HEAD_DIMS:
            raise ValueError(f"d_qk is {self.d_qk}; supported: {HEAD_DIMS}")
        if self.form == "single" and self.batch != 1:
            raise ValueError(f"batch is {self.batch} with form 'single'; supported: 1")
        if isinstance(self.lengths, tuple) and len(self.lengths) != self.tokens:
            raise ValueError(f"lengths: got {len(self.lengths)} for {self.tokens} tokens")

    @property
    def shape_id(self) -> str:
        """The first part of the id."""
        return f"{self.dtype}-d{self.d_qk}-b{self.batch}-q{self.s_q}-k{self.s_kv}t{self.topk}-h{self.h_q}"

    @property
    def tokens(self) -> int:
        """Query tokens of all requests."""
        return self.batch * self.s_q

    @cached_property
    def topk_lengths(self) -> tuple[int, ...] | None:
        """What the call is told of how many indices of each token count."""
        return told_lengths(self.lengths, self.tokens, self.topk, f"{self.seed} {self.tokens} {self.topk}")

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """How many indices of each token count."""
        return counted(self.topk_lengths, self.tokens, self.topk)

    @cached_property
    def request_lengths(self) -> tuple[int, ...]:
        """Rows that kv holds for each request."""
        if self.form in ("single", "batched"):
            return (self.s_kv,) * self.batch
        draw = random.Random(f"{self.seed} {self.batch} {self.s_kv}")
        drawn = [self.s_kv, 0, *(draw.randint(1, max(self.s_kv, 1)) for _ in range(self.batch))]
        return tuple(drawn[: self.batch])

    @property
    def kv_rows(self) -> int:
        """Rows of kv."""
        return sum(self.request_lengths) + (0 if self.form in ("single", "batched") else sum(MARGINS))

    @cached_property
    def offsets(self) -> tuple[int, ...] | None:
        """kv_offsets."""
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
        """Of each request, its first row in kv (all requests' rows counted one behind the other) and how many it has."""
        if self.offsets is None:
            return tuple((request * self.s_kv, self.s_kv) for request in range(self.batch))
        bounds = [min(max(offset, 0), self.kv_rows) for offset in self.offsets]
        return tuple((first, max(end - first, 0)) for first, end in pairwise(bounds))

    def invalid_indices(self, request: int) -> tuple[int, ...]:
        """Values that are no row of a request: FlashMLA's, and what names a neighbour's row, or the first or last row of kv."""
        first, rows = self.row_ranges[request]
        others = (min(-first, -1), max(self.kv_rows - 1 - first, rows))
        return -1, INT_MIN, -123456, rows, rows + 1, 114514, 1919810, 2_147_480_000, INT_MAX, *others

    def problem(self, arch: Arch) -> SparsePrefillProblem:
        """The shapes of the call."""
        return SparsePrefillProblem(
            arch=arch,
            dtype=self.dtype,
            d_qk=self.d_qk,
            batch=self.batch,
            s_q=self.s_q,
            h_q=self.h_q,
            row_alignment=self.row_alignment,
        )

    @property
    def tiles(self) -> int:
        """Tiles of 64 query rows x 64 keys, the measure of a simulated case's cost; an empty token counts as one key tile."""
        return sum(max(ceil_div(count, TILE_KEYS), 1) for count in self.counts) * ceil_div(self.h_q, TILE_ROWS)


@dataclass(frozen=True)
class SparsePrefillTensors:
    """The operands of a case.

    q dtype [b, s_q, h_q, d_qk]; kv dtype [b, s_kv, 1, d_qk], with offsets [kv_rows, 1, d_qk]; indices int32
    [b, s_q, 1, topk]; topk_length int32 [b, s_q]; attn_sink fp32 [h_q]; kv_offsets int32 [b + 1]; what is None is absent from
    the call. given: out dtype [b, s_q, h_q, 512], max_logits and lse fp32 [b, s_q, h_q]. Of form "single" all without batch.
    """

    q: Tensor
    kv: Tensor
    indices: Tensor
    topk_length: Tensor | None = None
    attn_sink: Tensor | None = None
    kv_offsets: Tensor | None = None
    given: Mapping[str, Given] = field(default_factory=dict)


def make_prefill_tensors(case: SparsePrefillCase, device: str | torch.device = "cpu") -> SparsePrefillTensors:
    """The operands of a case, the same for the same case (and on every device, unless they exceed 2^25 elements)."""
    device = torch.device(device)
    indices, named = _indices(case)
    kv = _kv(case, named.to(device))
    lengths = None if case.topk_lengths is None else _int32(case.topk_lengths, device).view(case.batch, case.s_q)
    return SparsePrefillTensors(
        q=_as_called(case, _q(case, device)),
        kv=_as_called(case, kv.unflatten(0, (case.batch, case.s_kv)) if case.offsets is None else kv),
        indices=_as_called(case, laid_out(indices, case.index_layout).to(device)).unsqueeze(-2),
        topk_length=None if lengths is None else _as_called(case, lengths),
        attn_sink=drawn_sinks(case.sinks, case.h_q, case.seed, device),
        kv_offsets=None if case.offsets is None else _int32(case.offsets, device),
        given=_given(case, device),
    )


def _as_called(case: SparsePrefillCase, tensor: Tensor) -> Tensor:
    """A tensor [b, ..] as the call of the case's form has it."""
    return tensor[0] if case.form == "single" else tensor


def _int32(values: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def _given(case: SparsePrefillCase, device: torch.device) -> dict[str, Given]:
    if case.outputs == "allocated":
        return {}
    per_row = (case.batch, case.s_q, case.h_q)
    results = {
        "out": given_out(case, device),
        "max_logits": given_fp32(case, per_row, 1, device),
        "lse": given_fp32(case, per_row, 2, device),
    }
    return {name: Given(_as_called(case, given.tensor), given.storage) for name, given in results.items()}


def _q(case: SparsePrefillCase, device: torch.device) -> Tensor:
    q = q_storage(case, device)
    values = normal((case.batch, case.s_q, case.h_q, case.d_qk), generator_for(case, q.numel(), device))
    if case.values in ("rising", "falling", "peaks"):
        values[..., -D_ROPE:] = STEEP * signs(values.device)
    return q.copy_(values)


def _indices(case: SparsePrefillCase) -> tuple[Tensor, Tensor]:
    """int32 [b, s_q, topk], and bool [kv_rows]: which rows of kv the indices that count name."""
    draw = torch.Generator().manual_seed(case.seed + 10)
    indices = torch.empty(case.batch, case.s_q, case.topk, dtype=torch.int32)
    named = torch.zeros(case.kv_rows, dtype=torch.bool)
    ordered = case.values in ("rising", "falling")
    for request, (first, rows) in enumerate(case.row_ranges):
        invalid = case.invalid_indices(request)
        for place in range(case.s_q):
            token = request * case.s_q + place
            keys = named_keys(case.indices, token, rows, case.topk, ordered=ordered, kinds=len(invalid), draw=draw)
            indices[request, place] = index_values(keys, torch.arange(rows), invalid)
            counting = keys[: case.counts[token]]
            named[first + counting[counting >= 0]] = True
    return indices, named


def _kv(case: SparsePrefillCase, named: Tensor) -> Tensor:
    """kv [kv_rows, 1, d_qk] in its layout, all requests' rows one behind the other; rows that are not named are NaN."""
    generator = generator_for(case, case.kv_rows * case.d_qk, named.device, 11)
    rows = normal((case.kv_rows, case.d_qk), generator)
    if case.values == "amplified":
        small = torch.rand(case.kv_rows, 1, generator=generator, device=rows.device) >= 0.02
        rows = torch.where(small, rows / AMPLIFIED, rows)
    elif case.values != "normal":
        for first, count in case.row_ranges:
            place = torch.arange(count, device=rows.device)
            level = levels(case.values, place / max(count - 1, 1), generator)
            rows[first : first + count, -D_ROPE:] = level[:, None] * signs(rows.device)
    kv = _kv_storage(case, named.device)
    kv.fill_(float("nan"))
    kv[named, 0] = rows.to(named.device)[named].to(kv)
    return kv


def _kv_storage(case: SparsePrefillCase, device: torch.device) -> Tensor:
    """[kv_rows, 1, d_qk] in its layout, NaN around it ("far": uninitialised, most never touched)."""
    rows, d_qk, dtype = case.kv_rows, case.d_qk, DTYPES[case.dtype]
    match case.kv_layout:
        case "packed":
            return nan_tensor((rows, 1, d_qk), dtype, device)
        case "padded_rows":
            return nan_tensor((rows, 1, d_qk + 64), dtype, device)[..., :d_qk]
        case "layers":
            return nan_tensor((rows, 3, 1, d_qk), dtype, device)[:, 1]
        case "far":
            stride = ceil_div(FAR_BYTES, rows * 7 // 8 * dtype.itemsize * 64) * 64
            storage = torch.empty((rows - 1) * stride + d_qk, dtype=dtype, device=device)
            return storage.as_strided((rows, 1, d_qk), (stride, d_qk, 1))
