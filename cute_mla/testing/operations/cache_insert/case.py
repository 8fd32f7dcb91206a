"""Cases of cache_insert."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
from torch import Tensor

from ....spec.arch import Arch
from ....spec.cache_insert import config_of, normalised_columns, rotates, rotates_values
from ....spec.cache_rows import CacheRowsConfig
from ....spec.mla import D_ROPE, ceil_div
from ...cases.base import DTYPES, Config, Tags
from ...cases.far import far_tensor
from ...cases.tensors import OutputBuffer, nan_tensor
from ..cache_write.case import CacheWriteCase, make_cache_write_tensors

QueryLayout = Literal["packed", "sliced", "odd", "heads_first", "far_tokens", "far_heads", "odd_far_heads"]
PositionType = Literal["int64", "int32", "strided", "far", "in_order"]
KeptKeys = Literal["none", "packed", "odd", "far"]
TableLayout = Literal["packed", "far"]

_QUERIES_OF_A_TILE = 128  # that cost about as much on the simulated device as a tile of attention
_BEYOND_32_BITS = ((1 << 32) + 4, 4 - (1 << 63))  # positions of which the low half is one of the table
_EVEN_KEY = 1024.0  # magnitude of all columns of a key: so large that eps changes no result of the norm
_GREATEST_WEIGHT = 3.5  # 448 / 128, in every group of columns


@dataclass(frozen=True)
class InsertProblem:
    """The properties of a call that select the kernel."""

    inserted: CacheRowsConfig

    @property
    def config(self) -> Config:
        """Return the variant that serves the call."""
        return self.inserted


@dataclass(frozen=True)
class CacheInsertCase(CacheWriteCase):
    """One insertion; fields as in CacheWriteCase.

    values: "nasty": every eighth key has columns of one magnitude, which the norm turns into the weights. The greatest of each group is 448
        times a power of two, where the scale of a group rises to the next power of two.
    heads: of queries, 0: without them, and where keys have no rotary columns.
    queries: layout of q_pe. "sliced": the last 64 of 192 columns; "odd": slices that begin at odd elements; "heads_first": a transposed
        [heads, tokens, 64]; "far_tokens", "far_heads", "odd_far_heads": the last token, or head, lies far.
    position_type: "strided": int64, every second element; "far": int64, the last element far; "in_order": positions None. Those of int64
        include some beyond 32 bits.
    kept: the tensor for keys. "odd": slices that begin at odd elements; "far": the last row lies far.
    table_rows: positions of cos_sin; every seventh token has one outside. table: "far": the last position lies far.
    """

    op: ClassVar[str] = "cache_insert"
    tags: ClassVar[Tags] = {
        **CacheWriteCase.tags,
        "queries": lambda layout: f"queries_{layout}",
        "position_type": lambda name: f"positions_{name}",
        "kept": lambda layout: f"kept_{layout}",
        "table": lambda layout: f"table_{layout}",
        "eps": lambda eps: f"eps{eps:g}",
    }

    heads: int = 3
    queries: QueryLayout = "packed"
    position_type: PositionType = "int64"
    kept: KeptKeys = "none"
    table_rows: int = 90
    table: TableLayout = "packed"
    eps: float = 1e-6

    @property
    def shape_id(self) -> str:
        """Return the first part of the id."""
        return f"{super().shape_id}-h{self.heads}-c{self.table_rows}"

    @property
    def tiles(self) -> int:
        """Return the cost on the simulated device, in tiles of attention."""
        return super().tiles + ceil_div(self.tokens * self.heads, _QUERIES_OF_A_TILE)

    def problem(self, arch: Arch) -> InsertProblem:  # type: ignore[override]
        """Return the properties of the call that select the kernel."""
        return InsertProblem(config_of(self.format, self.dtype))


@dataclass(frozen=True)
class CacheInsertTensors:
    """The operands of a case, as insert_kv_cache takes them. new_keys: the tensor for keys, full of NaN, or None."""

    kv_c: Tensor
    k_pe: Tensor | None
    q_pe: Tensor | None
    k_cache: Tensor
    slot_mapping: Tensor
    norm_weight: Tensor
    cos_sin: Tensor | None
    positions: Tensor | None
    descale_k: Tensor | None
    output_buffers: Mapping[str, OutputBuffer] = field(default_factory=dict)


def make_cache_insert_tensors(case: CacheInsertCase, device: str | torch.device = "cpu") -> CacheInsertTensors:
    """Make the operands of a case: equal for equal cases."""
    device = torch.device(device)
    written = make_cache_write_tensors(case, device)
    draw, dtype = torch.Generator().manual_seed(case.seed + 2), DTYPES[case.dtype]
    weight = (torch.randn(normalised_columns(case.format), generator=draw) + 0.5).to(device, dtype)
    if case.values == "nasty":
        weight.clamp_(max=3)[5::32] = _GREATEST_WEIGHT
        for columns in (written.kv_c, *((written.k_pe,) if rotates_values(case.format) and written.k_pe is not None else ())):
            columns[7::8] = torch.copysign(torch.full((), _EVEN_KEY), columns[7::8].float()).to(columns)
    operands = {name: getattr(written, name) for name in ("kv_c", "k_pe", "k_cache", "slot_mapping", "descale_k")}
    if not rotates(case.format):
        return CacheInsertTensors(**operands, q_pe=None, norm_weight=weight, cos_sin=None, positions=None)
    angles = 100 * torch.rand(case.table_rows, D_ROPE // 2, generator=draw)
    table = torch.cat((angles.cos(), angles.sin()), dim=1).to(device)
    if case.table == "far":
        table = far_tensor(table.shape, 0, table.dtype, device).copy_(table)
    queries = torch.randn(case.tokens, case.heads, D_ROPE, generator=draw).to(dtype)
    return CacheInsertTensors(
        **operands,
        q_pe=place_queries(case, queries, device) if case.heads else None,
        norm_weight=weight,
        cos_sin=table,
        positions=_positions(case, draw, device),
    )


def place_queries(case: CacheInsertCase, queries: Tensor, device: torch.device) -> Tensor:
    """Copy queries [tokens, heads, 64] to their layout, with NaN around them."""
    if case.queries == "heads_first":
        return queries.to(device).transpose(0, 1).clone(memory_format=torch.contiguous_format).transpose(0, 1)
    before, around = {"sliced": (128, 128), "odd": (3, 7), "odd_far_heads": (3, 7)}.get(case.queries, (0, 0))
    shape = (*queries.shape[:2], D_ROPE + around)
    if "far" in case.queries:
        wide = far_tensor(shape, int(case.queries != "far_tokens"), queries.dtype, device)
    else:
        wide = nan_tensor(shape, queries.dtype, device)
    return wide[..., before : before + D_ROPE].copy_(queries)


def place_keys(case: CacheInsertCase, device: torch.device) -> Tensor | None:
    """Allocate the tensor for keys in its layout, full of NaN, or return None."""
    shape, dtype = (case.tokens, case.format.d_qk), DTYPES[case.dtype]
    if case.kept == "none":
        return None
    if case.kept == "far":
        return far_tensor(shape, 0, dtype, device)
    around = {"packed": 0, "odd": 7}[case.kept]
    return nan_tensor((shape[0], shape[1] + around), dtype, device)[:, around // 2 : around // 2 + shape[1]]


def _positions(case: CacheInsertCase, draw: torch.Generator, device: torch.device) -> Tensor | None:
    """Draw positions, [tokens] of the case's type."""
    if case.position_type == "in_order":
        return None
    token = torch.arange(case.tokens)
    outside = torch.tensor([case.table_rows, -1, (1 << 31) - 1, -(1 << 31)])
    places = torch.randint(0, max(case.table_rows, 1), (case.tokens,), generator=draw)
    places = torch.where(token % 7 == 3, outside[token // 7 % 4], places)
    if case.position_type != "int32":
        places = torch.where(token % 14 == 5, torch.tensor(_BEYOND_32_BITS)[token // 14 % 2], places)
    if case.position_type == "far":
        return far_tensor(places.shape, 0, torch.int64, device).copy_(places)
    if case.position_type == "strided":
        return torch.stack((places, torch.full_like(places, -1)), dim=1).to(device)[:, 0]
    return places.to(device, torch.int32 if case.position_type == "int32" else torch.int64)
