"""Cases of cache_write."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
from torch import Tensor

from ....spec.cache_rows import latent_columns, rotary_columns
from ...cases.base import DTYPES, Tags
from ...cases.far import far_tensor
from ...cases.paged_cache import PagedCacheCase, allocate_cache, scale_tensor
from ...cases.tensors import OutputBuffer, generator_for, nan_tensor

KeyValues = Literal["normal", "nasty"]
KeyLayout = Literal["packed", "projection", "odd", "far"]
SlotType = Literal["int64", "int32", "strided", "far", "far_int32"]

_GROUP = 64  # columns; the groups of all formats are multiples or halves
_E4M3_MAX = 448.0


@dataclass(frozen=True)
class CacheWriteCase(PagedCacheCase):
    """One write.

    tokens: keys to write. Every fifth has a slot outside the cache, the others have distinct slots inside.
    values: "nasty": rows of NaN, infinities, both zeros, subnormal and the largest values, groups of zeros, and groups whose largest value
        is 448 times a power of two.
    key_layout: "projection": latent and rotary columns are slices of wider rows; "odd": slices that begin at odd elements;
        "far": the last key lies FAR_ELEMENTS or more from the first.
    slot_type: "strided": int64, every second element of a tensor; "far" and "far_int32": far in the same way, "far" as int64.
    power_of_two: fp32 scales are powers of two.
    """

    op: ClassVar[str] = "cache_write"
    tags: ClassVar[Tags] = {
        "values": str,
        "key_layout": lambda layout: f"keys_{layout}",
        "slot_type": lambda name: f"slots_{name}",
        "power_of_two": lambda _: "pow2",
        **PagedCacheCase.tags,
    }

    tokens: int = 65
    values: KeyValues = "normal"
    key_layout: KeyLayout = "packed"
    slot_type: SlotType = "int64"
    power_of_two: bool = False

    @property
    def shape_id(self) -> str:
        """Return the first part of the id."""
        return f"{self.cache}-{self.dtype}-t{self.tokens}-p{self.pages}x{self.page_size}"

    @property
    def keys(self) -> int:
        """Return the number of keys that the call moves."""
        return self.tokens


@dataclass(frozen=True)
class CacheWriteTensors:
    """The operands of a case, as write_kv_cache takes them."""

    kv_c: Tensor
    k_pe: Tensor | None
    k_cache: Tensor
    slot_mapping: Tensor
    descale_k: Tensor | None
    output_buffers: Mapping[str, OutputBuffer] = field(default_factory=dict)


def make_cache_write_tensors(case: CacheWriteCase, device: str | torch.device = "cpu") -> CacheWriteTensors:
    """Make the operands of a case: equal for equal cases."""
    device, latent = torch.device(device), latent_columns(case.format)
    columns = latent + rotary_columns(case.format)
    values = _key_values(case, columns).to(DTYPES[case.dtype])
    if case.key_layout == "far":
        rows = far_tensor((case.tokens, columns), 0, values.dtype, device).copy_(values)
        return _with_keys(case, rows[:, :latent], rows[:, latent:], device)
    before, around = {"packed": (0, 0), "projection": (64, 128), "odd": (3, 7)}[case.key_layout]
    wide = nan_tensor((case.tokens, columns + around), values.dtype, device)
    rows = wide[:, before : before + columns]
    rows.copy_(values)
    kv_c, k_pe = rows[:, :latent], rows[:, latent:]
    if case.key_layout == "packed":
        kv_c, k_pe = kv_c.contiguous(), k_pe.contiguous()
    return _with_keys(case, kv_c, k_pe, device)


def _with_keys(case: CacheWriteCase, kv_c: Tensor, rotary: Tensor, device: torch.device) -> CacheWriteTensors:
    """Add the other operands. rotary: columns of k_pe, or none."""
    k_pe = rotary if rotary.shape[1] else None
    slots = _slots(case)
    slots = far_tensor(slots.shape, 0, slots.dtype, device).copy_(slots) if case.slot_type.startswith("far") else slots.to(device)
    return CacheWriteTensors(kv_c, k_pe, allocate_cache(case, device), slots, scale_tensor(case, device))


def _key_values(case: CacheWriteCase, columns: int) -> Tensor:
    """Draw the keys, fp32 [tokens, columns]."""
    draw = generator_for(case, case.tokens * columns, torch.device("cpu"))
    values = torch.randn(case.tokens, columns, generator=draw)
    groups = torch.arange(columns // _GROUP)
    peaks = groups * _GROUP + (5 * torch.arange(case.tokens)[:, None] + groups) % _GROUP
    values.scatter_(1, peaks, values.gather(1, peaks).sign() * 12)  # each place of a group has its largest value in some token
    if case.values == "normal":
        return values
    most = torch.finfo(DTYPES[case.dtype]).max
    widely = 10.0 ** torch.empty(case.tokens, 1).uniform_(-8, 4, generator=draw)
    values *= widely.clamp(max=most / 16)
    kinds = torch.arange(case.tokens) % 8
    values[kinds == 1, 3] = math.nan
    values[kinds == 1, 72::64] = -math.inf
    values[kinds == 2] = torch.copysign(torch.zeros(()), values[kinds == 2])
    values[kinds == 3, :130] = -0.0
    values[kinds == 4] = values[kinds == 4].sign() * torch.finfo(DTYPES[case.dtype]).tiny * 2.0**-5  # subnormal
    values[kinds == 5, ::7] = most
    values[kinds == 7] = values[kinds == 7].clamp(-50, 50)
    values[kinds == 7, 5::_GROUP] = _E4M3_MAX * 2.0 ** (torch.arange(5, columns, _GROUP) // _GROUP - 3)
    values[kinds == 6] = values[kinds == 6].round(decimals=1) * 0 + torch.arange(columns).sub(300) / 64  # ties
    return values


def _slots(case: CacheWriteCase) -> Tensor:
    """Draw slot_mapping, [tokens] of the case's type."""
    slots = case.pages * case.page_size
    draw = torch.Generator().manual_seed(case.seed + 1)
    chosen = torch.randperm(slots, generator=draw)[: case.tokens]
    outside = torch.tensor([-1, slots, -(1 << 31), (1 << 31) - 1, slots + 5])
    chosen = torch.where(torch.arange(case.tokens) % 5 == 2, outside[torch.arange(case.tokens) // 5 % 5], chosen)
    if case.slot_type in ("int32", "far_int32"):
        return chosen.int()
    if case.slot_type in ("strided", "far"):
        chosen = torch.where(chosen == (1 << 31) - 1, 1 << 40, chosen)
    if case.slot_type == "strided":
        return torch.stack((chosen, torch.zeros_like(chosen)), dim=1)[:, 0]
    return chosen
