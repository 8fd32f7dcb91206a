"""Cases of index_write."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from ....spec.arch import Arch
from ....spec.index_write import DTYPE, ROTARY, IndexWriteConfig, Rope, Rows, ScaleFormat
from ....spec.mla import ceil_div
from ....spec.mqa_logits import COLUMNS, ROW_BYTES
from ...cases.base import DTYPES, TAGS, BaseCase, Tags
from ...cases.far import FAR_ELEMENTS, far_tensor, reserve
from ...cases.tensors import OutputBuffer, generator_for, nan_tensor

RowValues = Literal["normal", "nasty", "limits", "tiny"]
RowLayout = Literal["packed", "projection", "odd", "far", "far_heads"]
IntegerType = Literal["int64", "int32", "strided", "far", "far_int32"]
TableLayout = Literal["packed", "strided", "far"]
IndexCacheLayout = Literal["packed", "layers", "far"]

_NARROW = ("int32", "far_int32")
_UNUSED = 0xFF  # of codes and scales: NaN
_ROWS_OF_A_TILE = 48  # that cost about as much on the simulated device as a tile of attention
_ALIGNMENT = 16  # bytes, of rows of codes
_WIDE = ((1 << 32) + 3, -(1 << 63) + 3)  # outside everything, with low words that are inside
_LIMIT = 1.75  # times a power of two: the largest magnitude of a row behind which the next scale begins
_LIMIT_COLUMN = 100  # which is not rotated
_OVERFLOWING = 3.2e37  # a normalised column alone above zeros is 11.3, times which this is infinite


class IndexProblem(NamedTuple):
    """The properties of a call that select the kernel."""

    config: IndexWriteConfig


@dataclass(frozen=True)
class IndexWriteCase(BaseCase):
    """One call of write_index_cache or prepare_index_queries.

    rows: "keys": every fifth has a slot outside the cache, the others have distinct slots inside; "queries": of `heads` heads.
    values: "nasty": rows of NaN, infinities, both zeros, subnormal and the largest values, equal columns, and one column above zeros;
        "limits": rows whose largest magnitude is 1.75 times a power of two, where another scale begins, or infinite; "tiny": some rows, of
        keys their biases, too small for a scale of their own.
    positions: of cos_sin, of which it has `table_rows`; every seventh token's lies outside. False: tokens are at 0, 1, ..
    layout: of rows. "projection": slices of wider rows; "odd": slices that begin at odd elements; "far", "far_heads": the last token, or
        head, lies FAR_ELEMENTS or more from the first.
    integers: of slots and positions. "strided": int64, every second element of a tensor; "far" and "far_int32": far in the same way. Of
        int64 some are outside by their high words alone.
    table: of cos_sin. "strided": rows of a wider table; "far": the last row is far.
    cache_layout: "layers": one layer of three, whose pages lie side by side; "far": the last page lies beyond 2^32 bytes.
    outputs: of queries, as in BaseCase; far_tokens and far_heads put the last token or head far.
    wide_weights: weights are fp32, not bf16.
    """

    op: ClassVar[str] = "index_write"
    cut_by: ClassVar[str] = "tokens"
    tags: ClassVar[Tags] = {
        "rope": str,
        "hadamard": lambda _: "hadamard",
        "scale_format": str,
        "values": str,
        "positions": lambda _: "in_order",
        "layout": lambda layout: f"rows_{layout}",
        "integers": lambda name: f"integers_{name}",
        "table": lambda layout: f"table_{layout}",
        "cache_layout": lambda layout: f"cache_{layout}",
        "wide_weights": lambda _: "weights_bf16",
        **TAGS,
    }

    rows: Rows = "keys"
    tokens: int = 65
    heads: int = 1
    page_size: int = 64
    pages: int = 3
    table_rows: int = 100
    rope: Rope = "half_split"
    hadamard: bool = False
    scale_format: ScaleFormat = "fp32"
    values: RowValues = "normal"
    positions: bool = True
    layout: RowLayout = "packed"
    integers: IntegerType = "int64"
    table: TableLayout = "packed"
    cache_layout: IndexCacheLayout = "packed"
    wide_weights: bool = True

    @property
    def shape_id(self) -> str:
        """Return the first part of the id."""
        of_rows = f"p{self.pages}x{self.page_size}" if self.rows == "keys" else f"h{self.heads}"
        return f"{self.rows}-t{self.tokens}-{of_rows}-c{self.table_rows}"

    @property
    def q_shape(self) -> tuple[int, int, int, int]:
        """Return 1, tokens, heads and columns: a call without rows launches nothing."""
        return 1, self.tokens, self.heads, COLUMNS

    @property
    def tiles(self) -> int:
        """Return the cost on the simulated device, in tiles of attention."""
        return max(ceil_div(self.tokens * self.heads, _ROWS_OF_A_TILE), 1)

    def problem(self, arch: Arch) -> IndexProblem:
        """Return the properties of the call that select the kernel."""
        return IndexProblem(IndexWriteConfig(self.rows))


@dataclass(frozen=True)
class IndexWriteTensors:
    """The operands of a case, as the two functions take them; None for those of the other."""

    rows: Tensor
    cos_sin: Tensor
    positions: Tensor | None
    slot_mapping: Any = None
    norm_weight: Any = None
    norm_bias: Any = None
    index_cache: Any = None
    weights: Any = None
    output_buffers: Mapping[str, OutputBuffer] = field(default_factory=dict)


def make_index_write_tensors(case: IndexWriteCase, device: str | torch.device = "cpu") -> IndexWriteTensors:
    """Make the operands of a case: equal for equal cases."""
    device = torch.device(device)
    draw = generator_for(case, case.tokens * case.heads * COLUMNS, torch.device("cpu"))
    values = _row_values(case, draw)
    angles = 100 * torch.rand(case.table_rows, ROTARY // 2, generator=draw)
    table = _placed_table(case, torch.cat((angles.cos(), angles.sin()), dim=1), device)
    places = torch.randint(0, max(case.table_rows, 1), (case.tokens,), generator=draw)
    wide = () if case.integers in _NARROW else _WIDE
    outside = torch.tensor([*wide, case.table_rows, -1, (1 << 31) - 1, -(1 << 31)])
    token = torch.arange(case.tokens)
    places = torch.where(token % 7 == 3, outside[token // 7 % len(outside)], places)
    positions = _placed_integers(case, places, device) if case.positions else None
    shared = (_placed_rows(case, values, device), table, positions)
    if case.rows == "queries":
        weights = torch.randn(case.tokens, case.heads, generator=draw).to(torch.float32 if case.wide_weights else torch.bfloat16)
        placed = _placed_weights(case, weights, device)
        return IndexWriteTensors(*shared, weights=placed, output_buffers=_output_buffers(case, device))
    norm = _norm(case, draw).to(device)
    slots = case.pages * case.page_size
    chosen = torch.randperm(max(slots, case.tokens), generator=draw)[: case.tokens]
    beyond = torch.tensor([*wide, -1, slots, -(1 << 31), (1 << 31) - 1, slots + 5])
    chosen = torch.where((token % 5 == 2) | (chosen >= slots), beyond[token // 5 % len(beyond)], chosen)
    return IndexWriteTensors(
        *shared,
        slot_mapping=_placed_integers(case, chosen, device),
        norm_weight=norm[0],
        norm_bias=norm[1],
        index_cache=allocate_index_cache(case, device),
    )


def _norm(case: IndexWriteCase, draw: torch.Generator) -> Tensor:
    """Draw weight and bias of a norm, fp32 [2, 128]. A row of equal columns becomes the bias."""
    norm = torch.randn(2, COLUMNS, generator=draw) * torch.tensor([[1.0], [0.3]])
    if case.values == "limits":
        norm[0, _LIMIT_COLUMN] = _OVERFLOWING
        norm[1, _LIMIT_COLUMN] = _LIMIT
    if case.values == "tiny":
        norm[1] *= 2.0**-30
    return norm


def _row_values(case: IndexWriteCase, draw: torch.Generator) -> Tensor:
    """Draw rows, bf16 [tokens, heads, 128]."""
    values = torch.randn(case.tokens * case.heads, COLUMNS, generator=draw) + 0.5
    if case.values == "nasty":
        dtype = DTYPES[DTYPE]
        kinds = torch.arange(len(values)) % 9
        values *= 10.0 ** torch.empty(len(values), 1).uniform_(-6, 4, generator=draw)
        values[kinds == 1, 3] = math.nan
        values[kinds == 2, 72] = -math.inf
        values[kinds == 3] = torch.copysign(torch.zeros(()), values[kinds == 3])
        values[kinds == 4] = values[kinds == 4].sign() * torch.finfo(dtype).tiny * 2.0**-5  # subnormal
        values[kinds == 5, ::7] = torch.finfo(dtype).max
        values[kinds == 6] = 7.0  # no variance
        values[kinds == 7] = 0.0
        values[kinds == 7, 100] = 3.0
    elif case.values in ("limits", "tiny"):
        kinds = torch.arange(len(values)) % 4
        alone = torch.arange(COLUMNS) == _LIMIT_COLUMN
        keys = case.rows == "keys"
        values[kinds == 0] = torch.where(alone | torch.tensor(keys), _LIMIT, 0.25)
        values[kinds == 1] = torch.where(alone, 3.0 if keys else math.inf, 0.0)
        if case.values == "tiny" and not keys:
            values[kinds < 2] *= 2.0**-24
    return values.to(DTYPES[DTYPE]).view(case.tokens, case.heads, COLUMNS)


def _placed_rows(case: IndexWriteCase, values: Tensor, device: torch.device) -> Tensor:
    """Copy rows to their layout, with NaN around them; keys have two dimensions."""
    if case.layout in ("far", "far_heads"):
        placed = far_tensor(values.shape, int(case.layout == "far_heads"), values.dtype, device).copy_(values)
    else:
        before, around = {"packed": (0, 0), "projection": (64, 128), "odd": (3, 7)}[case.layout]
        wide = nan_tensor((*values.shape[:-1], COLUMNS + around), values.dtype, device)
        placed = wide[..., before : before + COLUMNS].copy_(values)
    return placed[:, 0] if case.rows == "keys" else placed


def _placed_table(case: IndexWriteCase, table: Tensor, device: torch.device) -> Tensor:
    """Copy cos_sin to its layout, with NaN around its rows."""
    if case.table == "far":
        return far_tensor(table.shape, 0, table.dtype, device).copy_(table)
    around = {"packed": 0, "strided": 8}[case.table]
    wide = nan_tensor((len(table), ROTARY + around), table.dtype, device)
    return wide[:, around // 2 : around // 2 + ROTARY].copy_(table)


def _placed_integers(case: IndexWriteCase, values: Tensor, device: torch.device) -> Tensor:
    """Copy slots or positions to their type and layout."""
    dtype = torch.int32 if case.integers in _NARROW else torch.int64
    if case.integers.startswith("far"):
        return far_tensor(values.shape, 0, dtype, device).copy_(values)
    if case.integers == "strided":
        return torch.stack((values, torch.full_like(values, -1)), dim=1).to(device)[:, 0]
    return values.to(device, dtype)


def _placed_weights(case: IndexWriteCase, weights: Tensor, device: torch.device) -> Tensor:
    """Copy weights to the layout of the rows, with NaN around them."""
    if case.layout == "far":
        return far_tensor(weights.shape, 0, weights.dtype, device).copy_(weights)
    around = 0 if case.layout == "packed" else 3
    wide = nan_tensor((case.tokens, case.heads + around), weights.dtype, device)
    return wide[:, around // 2 : around // 2 + case.heads].copy_(weights)


def allocate_index_cache(case: IndexWriteCase, device: torch.device) -> Tensor:
    """Allocate uint8 [pages, page size, 1, 132] in its layout, every byte 0xFF; "far": only its elements."""
    own = case.page_size * ROW_BYTES
    stride = {"packed": own, "layers": 3 * own, "far": ceil_div(FAR_ELEMENTS, (case.pages - 1) * _ALIGNMENT or 1) * _ALIGNMENT}
    pages = stride[case.cache_layout]
    first = own if case.cache_layout == "layers" else 0
    if case.cache_layout == "far":
        storage = reserve((case.pages - 1) * pages + own, device)
    else:
        storage = torch.full((case.pages * pages,), _UNUSED, dtype=torch.uint8, device=device)
    storage.as_strided((case.pages, own), (pages, 1), first).fill_(_UNUSED)
    return storage.as_strided((case.pages, case.page_size, 1, ROW_BYTES), (pages, ROW_BYTES, ROW_BYTES, 1), first)


def index_cache_bytes(case: IndexWriteCase, index_cache: Tensor) -> Tensor:
    """Copy the bytes of a cache to int16, a result to compare; the memory around pages is included unless they are far apart."""
    if case.cache_layout == "far":
        return index_cache.flatten(1).contiguous().view(torch.int16)
    return torch.empty(0, dtype=torch.uint8, device=index_cache.device).set_(index_cache.untyped_storage()).clone().view(torch.int16)


def _output_buffers(case: IndexWriteCase, device: torch.device) -> dict[str, OutputBuffer]:
    """Allocate the results if the caller passes them; those of "strided" and "odd" are slices."""
    if case.outputs == "allocated":
        return {}
    shapes = {"out": (case.tokens, case.heads, COLUMNS), "out_weights": (case.tokens, case.heads)}
    dtypes = {"out": torch.float8_e4m3fn, "out_weights": torch.float32}
    if case.outputs in ("far_tokens", "far_heads"):
        far = {
            "out": far_tensor(shapes["out"], int(case.outputs == "far_heads"), dtypes["out"], device),
            "out_weights": far_tensor(shapes["out_weights"], 0, dtypes["out_weights"], device),
        }
        return {name: OutputBuffer(tensor, tensor) for name, tensor in far.items()}
    around = {"given": 0, "strided": _ALIGNMENT, "odd": 3 * _ALIGNMENT}[case.outputs]
    buffers = {}
    for name, shape in shapes.items():
        storage = nan_tensor((*shape[:-1], shape[-1] + around), torch.float32, device).to(dtypes[name])
        buffers[name] = OutputBuffer(storage[..., around // 3 // _ALIGNMENT * _ALIGNMENT :][..., : shape[-1]], storage)
    return buffers
