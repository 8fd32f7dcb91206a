"""Cases of dense prefill.

A case's seed determines its tensors, which probe what a kernel must not read: every row of q, k and v that belongs to no sequence is NaN,
and so is the memory between and around rows. The keys and values of a sequence's neighbours may be NaN, too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import ClassVar, Literal

import torch
from torch import Tensor

from ....reference import visible_keys
from ....spec.arch import Arch
from ....spec.dense_prefill import HEAD_DIMS, ROW_BYTES, DensePrefillProblem
from ....spec.masked_prefill import MASK_WORD_KEYS
from ....spec.mla import ceil_div
from ...cases.base import DTYPES, TAGS, BaseCase, CausalValues, Tags
from ...cases.far import far_tensor
from ...cases.tensors import (
    PREFILL_TILE_KEYS,
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

MARGINS = (7, 4)  # tokens before the first sequence and after the last
BLOCK = 64  # query rows and keys of a tile, the unit of a case's cost

Ends = Literal["margins", "clipped"]
Neighbours = Literal["finite", "nan"]
KvLayout = Literal["packed", "padded", "kvpacked", "heads_first", "far_tokens", "far_heads"]
Mask = Literal["random", "blocks", "single", "edges", "gaps"]
SeqLengths = tuple[tuple[int, int], ...]  # query tokens and keys of each sequence


def _lengths_tag(lengths: SeqLengths) -> str:
    return "_".join(f"{s_q}x{s_k}" for s_q, s_k in lengths)


@dataclass(frozen=True)
class DensePrefillCase(BaseCase):
    """One call of dense prefill.

    lengths: query tokens and keys of each sequence. group: query heads per KV head.
    values: as in DenseDecodeCase, along the keys of each sequence.
    ends: "margins": tokens of no sequence before the first sequence and after the last; query tokens of no sequence only if the
        caller passes results, since the call leaves their rows unwritten; "clipped": no such tokens, but the first offsets are
        negative and the last offset lies far beyond the tensors.
    neighbours: "nan": keys and values of the second, fourth, .. sequence are NaN, and so are the results of these sequences.
    kv_layout: "padded": rows further apart than their length; "kvpacked": k and v are slices of one tensor; "heads_first":
        transposed [h_kv, total_k, ..]; "far_tokens", "far_heads": far in this dimension.
    mask: the keys that key_mask shows a row; None: there is no mask. "random": a fourth of the keys, to every fifth row none; "blocks":
        every third of 128 keys, others to the next 128 rows; "single": one key; "edges": the first and last keys of some words;
        "gaps": every second of 32 tiles of 128 keys, others to the next 256 rows. Bits of keys that a sequence does not have are 1, and
        so are rows of no sequence. Keys that no row of a sequence sees are NaN.
    mask_layout: "padded": rows an odd number of words apart, from a second word on; "far_tokens": rows that are far.
    """

    op: ClassVar[str] = "dense_prefill"
    cut_by: ClassVar[str] = "group"
    tags: ClassVar[Tags] = {
        "ends": str,
        "neighbours": lambda neighbours: f"{neighbours}_neighbours",
        "kv_layout": lambda layout: f"kv_{layout}",
        "mask": lambda mask: f"mask_{mask}",
        "mask_layout": lambda layout: f"mask_{layout}",
        **TAGS,
    }

    d_qk: int = 192
    lengths: SeqLengths = ((128, 128),)
    h_kv: int = 1
    group: int = 1
    causal: bool = False
    values: CausalValues = "normal"
    ends: Ends = "margins"
    neighbours: Neighbours = "finite"
    kv_layout: KvLayout = "packed"
    mask: Mask | None = None
    mask_layout: Literal["packed", "padded", "far_tokens"] = "packed"

    def __post_init__(self) -> None:
        if self.d_qk not in HEAD_DIMS:
            raise ValueError(f"d_qk is {self.d_qk}; supported: {HEAD_DIMS}")
        if self.neighbours == "nan" and self.causal and any(s_q > s_k > 0 for s_q, s_k in self.lengths[1::2]):
            raise ValueError(
                f"lengths are {self.lengths} with neighbours 'nan', causal; supported: rows that see no key only in sequences without NaN"
            )

    @property
    def shape_id(self) -> str:
        """Return the first part of the id."""
        causal = "causal" if self.causal else "full"
        return f"{self.dtype}-d{self.d_qk}-{_lengths_tag(self.lengths) or 'none'}-h{self.h_kv}x{self.group}-{causal}"

    @property
    def d_v(self) -> int:  # type: ignore[override]
        """Return the columns of v and out."""
        return HEAD_DIMS[self.d_qk]

    @property
    def h_q(self) -> int:
        """Return the number of query heads."""
        return self.h_kv * self.group

    @cached_property
    def q_starts(self) -> tuple[int, ...]:
        """Return the first row of q of each sequence, and the end of the last sequence."""
        margin = MARGINS[0] if self._q_margins else 0
        return tuple(accumulate((s_q for s_q, _ in self.lengths), initial=margin))

    @cached_property
    def k_starts(self) -> tuple[int, ...]:
        """Return the first row of k and v of each sequence, and the end of the last sequence."""
        return tuple(accumulate((s_k for _, s_k in self.lengths), initial=MARGINS[0] if self._k_margins else 0))

    @property
    def _q_margins(self) -> bool:
        return self.ends == "margins" and self.outputs != "allocated"

    @property
    def _k_margins(self) -> bool:
        return self.ends == "margins"

    @property
    def total_q(self) -> int:
        """Return the rows of q."""
        return self.q_starts[-1] + (MARGINS[1] if self._q_margins else 0)

    @property
    def total_k(self) -> int:
        """Return the rows of k and v."""
        return self.k_starts[-1] + (MARGINS[1] if self._k_margins else 0)

    @property
    def max_seqlen_q(self) -> int:
        """Return the query tokens of the longest sequence."""
        return max((s_q for s_q, _ in self.lengths), default=0)

    @property
    def max_seqlen_k(self) -> int:
        """Return the keys of the longest sequence."""
        return max((s_k for _, s_k in self.lengths), default=0)

    @property
    def kernel_op(self) -> str:
        """Return the op of the kernel that a record names."""
        return self.op if self.mask is None else "masked_prefill"

    @property
    def q_shape(self) -> tuple[int, int, int, int]:
        """Return (1, total_q, h_q, d_qk)."""
        return 1, self.total_q, self.h_q, self.d_qk

    def row_bytes(self, arch: Arch) -> int:
        """Return the number of bytes at multiples of which rows of q and out must begin."""
        return ROW_BYTES

    def problem(self, arch: Arch) -> DensePrefillProblem:
        """Return the shapes of the call."""
        return DensePrefillProblem(
            arch=arch,
            dtype=self.dtype,
            d_qk=self.d_qk,
            batch=len(self.lengths),
            h_q=self.h_q,
            h_kv=self.h_kv,
            max_seqlen_q=self.max_seqlen_q,
        )

    @property
    def tiles(self) -> int:
        """Return the cost on the simulated device: unmasked tiles of 64 query rows x 64 keys; rows without keys cost one tile."""
        return sum(max(ceil_div(keys, BLOCK), 1) for lengths in self.lengths for keys in self._keys_of_blocks(*lengths)) * self.h_q

    def _keys_of_blocks(self, s_q: int, s_k: int) -> list[int]:
        """Return for each block of 64 query rows of a sequence how many keys its last row attends to."""
        ends = [min(first + BLOCK, s_q) for first in range(0, s_q, BLOCK)]
        return [min(max(end + s_k - s_q, 0), s_k) if self.causal else s_k for end in ends]


@dataclass(frozen=True)
class DensePrefillTensors:
    """The operands of a case.

    q dtype [total_q, h_q, d_qk]; k dtype [total_k, h_kv, d_qk]; v dtype [total_k, h_kv, d_v]; cu_seqlens_q, cu_seqlens_k int32
    [sequences + 1]; key_mask int32 [total_q, words] or None. output_buffers: out dtype [total_q, h_q, d_v], lse fp32 [total_q, h_q].
    """

    q: Tensor
    k: Tensor
    v: Tensor
    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    key_mask: Tensor | None = None
    output_buffers: Mapping[str, OutputBuffer] = field(default_factory=dict)


def make_dense_prefill_tensors(case: DensePrefillCase, device: str | torch.device = "cpu") -> DensePrefillTensors:
    """Make the operands of a case: equal for equal cases, and on every device if none exceeds 2^25 elements."""
    device = torch.device(device)
    buffers = allocate_output_buffers(case, device, {"lse": Fp32Result((1, case.total_q, case.h_q), 1, 2)}, drop_batch=True)
    return DensePrefillTensors(**make_inputs(case, device), output_buffers=buffers)


def make_inputs(case: DensePrefillCase, device: torch.device) -> dict[str, Tensor]:
    """Make the operands that a forward call reads, by name."""
    k, v = _kv_storage(case, device)
    for sequence, (first, (_, s_k)) in enumerate(zip(case.k_starts, case.lengths, strict=False)):
        if case.neighbours == "finite" or sequence % 2 == 0:
            _fill_keys(case, sequence, k[first : first + s_k], v[first : first + s_k])
    ends = {"cu_seqlens_q": _offsets(case, case.q_starts, device), "cu_seqlens_k": _offsets(case, case.k_starts, device)}
    return {"q": _q(case, device), "k": k, "v": v, **ends, **_masks(case, k)}


def _masks(case: DensePrefillCase, k: Tensor) -> dict[str, Tensor]:
    """Make the mask of a case that has one, and fill the keys that nobody sees with NaN."""
    if case.mask is None:
        return {}
    mask = _mask_storage(case, k.device)
    for sequence, (s_q, s_k) in enumerate(case.lengths):
        rows = slice(case.q_starts[sequence], case.q_starts[sequence] + s_q)
        seen = shown_keys(case.mask, s_q, s_k, generator_for(case, s_q * s_k, k.device, 2000 + sequence))
        pack_bits(seen, mask[rows])
        if case.causal:
            seen &= visible_keys(s_q, s_k, True, k.device)
        k[case.k_starts[sequence] : case.k_starts[sequence] + s_k][~seen.any(dim=0)] = math.nan
    return {"key_mask": mask}


def _mask_storage(case: DensePrefillCase, device: torch.device) -> Tensor:
    """Allocate int32 [total_q, words] full of ones in the layout of a case."""
    shape = (case.total_q, ceil_div(case.max_seqlen_k, MASK_WORD_KEYS))
    match case.mask_layout:
        case "far_tokens":
            return far_tensor(shape, 0, torch.int32, device)
        case "padded":
            padding = 3 - shape[1] % 2
            return torch.full((shape[0], shape[1] + padding), -1, dtype=torch.int32, device=device)[:, 1 : 1 + shape[1]]
        case "packed":
            return torch.full(shape, -1, dtype=torch.int32, device=device)


def shown_keys(mask: Mask, s_q: int, s_k: int, generator: torch.Generator) -> Tensor:
    """Return bool [s_q, s_k]: the keys that a mask shows each row of a sequence."""
    row, key = torch.arange(s_q, device=generator.device).unsqueeze(1), torch.arange(s_k, device=generator.device)
    match mask:
        case "random":
            return (torch.rand((s_q, s_k), generator=generator, device=generator.device) < 0.25) & (row % 5 != 3)
        case "blocks":
            return (key // PREFILL_TILE_KEYS + row // PREFILL_TILE_KEYS) % 3 == 0
        case "single":
            return key == (row * 37 + 5) % max(s_k, 1)
        case "edges":
            return ((key + row) % 64 == 0) | ((key + row) % 64 == 31) | (key == 0)
        case "gaps":
            return (key // (32 * PREFILL_TILE_KEYS) + row // 256) % 2 == 1


def pack_bits(seen: Tensor, words: Tensor) -> None:
    """Write bool [rows, keys] to the first bits of int32 [rows, words]. Bits behind the last key stay as they are."""
    for key in range(seen.shape[1]):
        bit = 1 << (key % MASK_WORD_KEYS)
        bit = bit - (1 << MASK_WORD_KEYS) if bit >> (MASK_WORD_KEYS - 1) else bit
        word = words[:, key // MASK_WORD_KEYS]
        word.copy_(torch.where(seen[:, key], word | bit, word & ~bit))


def _offsets(case: DensePrefillCase, starts: tuple[int, ...], device: torch.device) -> Tensor:
    offsets = list(starts)
    if case.ends == "clipped" and len(offsets) > 1:
        offsets = [start if start > starts[0] else -5 - number for number, start in enumerate(offsets)]
        offsets[-1] = 1 << 30
    return torch.tensor(offsets, dtype=torch.int32, device=device)


def _q(case: DensePrefillCase, device: torch.device) -> Tensor:
    q = allocate_q(case, device)[0]
    own = q[case.q_starts[0] : case.q_starts[-1]]
    own.copy_(draw_queries(case.values, tuple(own.shape), generator_for(case, own.numel(), device), PREFILL_TILE_KEYS))
    return q


def _fill_keys(case: DensePrefillCase, sequence: int, k: Tensor, v: Tensor) -> None:
    """Draw the keys and values of a sequence."""
    generator = generator_for(case, k.numel(), k.device, 1000 + 2 * sequence)
    keys = normal_values(tuple(k.shape), generator)
    if case.values != "normal":
        ramp_keys(case.values, keys, len(keys), generator, backwards=True)  # as the kernels walk
    k.copy_(keys)
    v.copy_(normal_values(tuple(v.shape), generator_for(case, k.numel(), k.device, 1001 + 2 * sequence)))


def _kv_storage(case: DensePrefillCase, device: torch.device) -> tuple[Tensor, Tensor]:
    """Allocate k [total_k, h_kv, d_qk] and v [total_k, h_kv, d_v] in their layout, with NaN in and around them."""
    rows, heads, d_qk, dtype = case.total_k, case.h_kv, case.d_qk, DTYPES[case.dtype]
    match case.kv_layout:
        case "packed":
            return nan_tensor((rows, heads, d_qk), dtype, device), nan_tensor((rows, heads, case.d_v), dtype, device)
        case "padded":
            k, v = (nan_tensor((rows, heads + 1, columns + 64), dtype, device) for columns in (d_qk, case.d_v))
            return k[:, 1:, 8 : 8 + d_qk], v[:, :-1, 16 : 16 + case.d_v]
        case "kvpacked":
            both = nan_tensor((rows, heads, d_qk + case.d_v), dtype, device)
            return both[..., :d_qk], both[..., d_qk:]
        case "heads_first":
            k, v = (nan_tensor((heads, rows, columns), dtype, device) for columns in (d_qk, case.d_v))
            return k.transpose(0, 1), v.transpose(0, 1)
        case far:
            dim = ("far_tokens", "far_heads").index(far)
            k, v = (far_tensor((rows, heads, columns), dim, dtype, device) for columns in (d_qk, case.d_v))
            return k, v
