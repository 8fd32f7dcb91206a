"""Cases of topk_indices."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from ....spec.arch import Arch
from ....spec.mla import ceil_div
from ....spec.topk_indices import LISTED, RESIDENT_ROWS, STREAM_TILE, THREADS, TopkIndicesConfig, config_for, streams
from ...cases.base import TAGS, BaseCase, Tags
from ...cases.far import far_tensor
from ...cases.tensors import OutputBuffer, generator_for, sliced_buffers

# fmt: off
LogitValues = Literal[
    "random", "rising", "falling", "narrow", "crowded", "twins", "plateau", "equal", "few", "scarce", "sparse", "runs",
    "filling", "specials", "nan",
]
# fmt: on
LogitLayout = Literal["packed", "odd", "expanded", "far_rows"]
RowLengths = Literal["full", "edges", "about_topk", "short", "empty", "last"]

_NUMBERS_OF_A_TILE = 3_000  # numbers that cost about as much on the simulated device as a tile of attention
_ROW_TILES = {1: 1, 2: 2, 4: 3, 8: 4}  # of a row besides its numbers, by CTAs that share it
_BOARD = 132  # SMs; cases have too few rows for a larger board to matter
_LANES = 32
_LISTED = 256  # numbers that a warp lists: in "runs", every other warp has as many or one more
_OF_OTHERS = (144, 144, 144, 144, 129)  # of the others, by turns
_SHIFTS = 9  # of the numbers of "runs", by 32 each: the last that is listed is in every place of a block of 256
_FEW = 4  # different numbers of "few"
_SIGNS = torch.tensor([0.0, -0.0])


class TopkProblem(NamedTuple):
    """The properties of a call that select the kernel."""

    config: TopkIndicesConfig


@dataclass(frozen=True)
class TopkIndicesCase(BaseCase):
    """One selection of `topk` of n numbers in each of `rows` rows.

    lengths: "full": n; "edges": 0, negative, 1, 31 to 33, 255 to 257, n - 1, n, and more than n; "about_topk": topk - 1 to topk + 1;
        "short": 1 to topk; "empty": 0 and less; "last": n of the last row, 0 of the others. Numbers behind a length are inf or NaN, which
        would be chosen, or spread.
    values: "narrow": in [1, 1.245), equal in their upper bits; "crowded": in (-2.24, -2] but for 3 in three quarters as many places as are
        chosen; "twins": by halves of the row in [1, 1.01) and in [-3.51, -3.5), whose keys differ in the first bit and otherwise agree in
        their upper ones; "plateau": 0 and -0 but for a few; "equal": one number; "few": four numbers; "scarce": as well, the greatest in a
        twentieth of the places and the next in half of them; "sparse": of 8 numbers of a lane one is as in "narrow", most of them near 1,
        the others are lower, and the last of each warp is the greatest; "runs": in each warp 257, 256, 144 or 129 numbers as in "narrow",
        the last of them the greatest, the others lower: one more than a warp lists, as many, and one more than it looks at together;
        "filling": a list of a row that is read once gets one less than it holds, as many or one more, by topk % 3;
        "specials": inf, -inf, NaN of both signs, 0, -0 and subnormals among others; "nan": NaN but for topk / 2.
    layout: "odd": rows of n + 1 numbers, from the second on; "expanded": all rows are one; "far_rows": the last row lies FAR_ELEMENTS or
        more from the first.
    outputs: far_requests puts the last row far.
    """

    op: ClassVar[str] = "topk_indices"
    cut_by: ClassVar[str] = "rows"
    tags: ClassVar[Tags] = {
        "values": str,
        "lengths": lambda lengths: f"{lengths}_lengths",
        "layout": lambda layout: f"logits_{layout}",
        **TAGS,
    }

    dtype: str = "fp32"
    rows: int = 3
    columns: int = 1000
    topk: int = 64
    values: LogitValues = "random"
    lengths: RowLengths = "full"
    layout: LogitLayout = "packed"

    @property
    def shape_id(self) -> str:
        """Return the first part of the id."""
        return f"r{self.rows}-n{self.columns}-k{self.topk}"

    @property
    def q_shape(self) -> tuple[int, int, int, int]:
        """Return rows, 1, positions and 1: a call without them launches nothing."""
        return self.rows, 1, self.topk, 1

    @property
    def cluster(self) -> int:
        """Return the CTAs that share a row, on each board where a case does not set their number."""
        return config_for(self.rows, self.columns, self.topk, self.sm_count or _BOARD).cluster

    @property
    def tiles(self) -> int:
        """Return the cost on the simulated device, in tiles of attention."""
        return max(ceil_div(self.rows * self.columns, _NUMBERS_OF_A_TILE), self.rows * _ROW_TILES[self.cluster], 1)

    def problem(self, arch: Arch) -> TopkProblem:
        """Return the properties of the call that select the kernel."""
        return TopkProblem(config_for(self.rows, self.columns, self.topk, self.sm_count or arch.sm_count, once=streams(arch)))


@dataclass(frozen=True)
class TopkIndicesTensors:
    """The operands of a case: logits fp32 [rows, n] and lengths int32 [rows]."""

    logits: Tensor
    lengths: Tensor
    output_buffers: Mapping[str, OutputBuffer] = field(default_factory=dict)


def make_topk_indices_tensors(case: TopkIndicesCase, device: str | torch.device = "cpu") -> TopkIndicesTensors:
    """Make the operands of a case: equal for equal cases."""
    device = torch.device(device)
    distinct = min(case.rows, 1) if case.layout == "expanded" else case.rows
    logits = numbers_of(case, distinct)
    lengths = _row_lengths(case)
    behind = torch.arange(case.columns) >= lengths[:, None]
    if case.layout == "expanded":
        behind = behind.all(dim=0, keepdim=True)[:distinct]
    tempting = torch.where(torch.arange(case.columns) % 2 == 0, math.inf, math.nan).expand(distinct, -1)
    logits = torch.where(behind, tempting, logits)
    buffers = sliced_buffers(case.outputs, {"out": ((case.rows, case.topk), torch.int32)}, device)
    return TopkIndicesTensors(_placed(case, logits.to(device)), lengths.int().to(device), buffers)


def numbers_of(case: TopkIndicesCase, rows: int) -> Tensor:
    """Draw the numbers of so many rows of a case, fp32 [rows, n]."""
    shape = (rows, case.columns)
    draw = generator_for(case, math.prod(shape), torch.device("cpu"))
    random = torch.randn(shape, generator=draw)
    place = torch.arange(case.columns).expand(shape)
    kind = torch.randint(0, 12, shape, generator=draw)
    match case.values:
        case "rising":
            return place * 0.25 - 40.0
        case "falling":
            return 40.0 - place * 0.25
        case "narrow":
            return 1.0 + 0.245 * torch.rand(shape, generator=draw)
        case "crowded":
            apart = max(case.columns // max(case.topk * 3 // 4, 1), 1)
            return torch.where(place % apart == 9 % apart, 3.0, -2.0 - 0.2 * random.abs().clamp(max=1.2))
        case "twins":
            return torch.where(2 * place < case.columns, 1.0, -3.51) + 0.01 * torch.rand(shape, generator=draw)
        case "plateau":
            zeros = _SIGNS[(kind % 2)]
            return torch.where(kind == 11, random, zeros)
        case "equal":
            return torch.full(shape, -1.5)
        case "few":
            return (kind % _FEW).float() - 2.0
        case "scarce":
            part = torch.rand(shape, generator=draw)
            return torch.where(part < 0.05, 2.0, torch.where(part < 0.55, 1.0, -(kind % _FEW).float()))
        case "sparse" | "runs":
            own = ceil_div(case.columns, case.cluster * THREADS) * _LANES
            return _runs(place, own, draw) if case.values == "runs" else _sparse(place, own, draw)
        case "filling":
            return _filling(place, case.topk)
        case "specials":
            special = torch.tensor([math.inf, -math.inf, math.nan, -math.nan, 0.0, -0.0, 1e-40, -1e-40, 3.4e38, -3.4e38, 1.0, -1.0])
            return torch.where(torch.rand(shape, generator=draw) < 0.5, special[kind], random)
        case "nan":
            return torch.where(
                place % max(2 * case.columns // max(case.topk, 1), 1) == 0, random, torch.copysign(torch.tensor(math.nan), random)
            )
        case _:
            return random


def _sparse(place: Tensor, own: int, draw: torch.Generator) -> Tensor:
    """Draw the numbers of "sparse" for places [rows, n]. own: numbers of a warp."""
    near = 1.0 + 0.244 * torch.rand(place.shape, generator=draw) ** 4
    last = (place % own == own - 1) | (place == place.shape[1] - 1)
    low = -2.0 - torch.rand(place.shape, generator=draw)
    return torch.where(last, 1.249, torch.where(place // _LANES % 8 == 0, near, low))


def _runs(place: Tensor, own: int, draw: torch.Generator) -> Tensor:
    """Draw the numbers of "runs" for places [rows, n]. own: numbers of a warp. The last that is kept is greater than the next one."""
    warp = place // own
    turn = warp // 2
    most = _LISTED + (turn + 1) % 2
    count = torch.where(warp % 2 == 0, most, torch.tensor(_OF_OTHERS)[turn % len(_OF_OTHERS)])
    shifts = min(_SHIFTS, max(own - _LISTED - 1, 0) // _LANES + 1)
    behind = own - place % own - turn % shifts * _LANES
    near = 1.0 + 0.12 * (place % 2) + 0.12 * torch.rand(place.shape, generator=draw)
    low = -2.0 - torch.rand(place.shape, generator=draw)
    return torch.where((behind > 0) & (behind <= count), torch.where((behind == 1) | (place % own == RESIDENT_ROWS - 1), 1.249, near), low)


def _filling(place: Tensor, topk: int) -> Tensor:
    """Return the numbers of "filling" for places [rows, n].

    topk of the first tile are left, then comes the second, all of which is greater, then a part of the third.
    """
    more = LISTED - topk - STREAM_TILE + topk % 3 - 1
    first = torch.where(place < topk, 10.0, 0.0)
    later = torch.where(place < 2 * STREAM_TILE + more, 20.0 + place / 256, 0.0)
    return torch.where(place == place.shape[1] - 1, 5000.0, torch.where(place < STREAM_TILE, first, later))


def _row_lengths(case: TopkIndicesCase) -> Tensor:
    """Return the lengths of the rows, int64 [rows]."""
    n, topk = case.columns, case.topk
    kinds = {
        "full": [n],
        "edges": [n, 0, n - 1, -1, n + 1, 33, (1 << 31) - 1, 257, 1, 31, 32, 255, 256, -(1 << 31), n // 2 + 1],
        "about_topk": [topk + 1, topk, topk - 1],
        "short": [topk, topk // 2 + 1, 1],
        "empty": [0, -3],
        "last": [0] * (case.rows - 1) + [n],
    }[case.lengths]
    return torch.tensor([kinds[row % len(kinds)] for row in range(case.rows)], dtype=torch.int64)


def _placed(case: TopkIndicesCase, logits: Tensor) -> Tensor:
    """Copy logits [rows, n] to their layout, with NaN around them."""
    if case.layout == "expanded":
        return logits.expand(case.rows, -1)
    if case.layout == "far_rows":
        return far_tensor(logits.shape, 0, logits.dtype, logits.device).copy_(logits)
    if case.layout == "odd":
        wide = torch.full((case.rows, case.columns + 1), math.nan, device=logits.device)
        return wide[:, 1:].copy_(logits)
    return logits.contiguous()
