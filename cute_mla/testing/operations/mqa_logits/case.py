"""Cases of mqa_logits.

A case's seed determines its tensors. Every byte that must not matter is part of a NaN: keys that no token sees and their scales, pages
that no request uses, page 0 among them, and the memory around all operands.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
from torch import Tensor

from ....reference import paged_ends
from ....spec.arch import Arch
from ....spec.mla import ceil_div
from ....spec.mqa_logits import COLUMNS, DTYPE, ROW_BYTES, SCALE_BYTES, MqaLogitsProblem
from ...cases.base import TAGS, BaseCase, Tags
from ...cases.far import FAR_ELEMENTS, far_tensor, reserve
from ...cases.tensors import OUTSIDE, OutputBuffer, generator_for, outside_pages, sliced_buffers

LogitsValues = Literal["exact", "plateau", "nan_keys", "normal"]
KeyWindows = Literal["causal", "whole", "random", "sequences", "edges", "near", "last", "empty"]
RequestLengths = Literal["full", "edges", "near", "last", "random", "empty"]
LogitsLayout = Literal["packed", "strided", "far_q", "far_keys", "far_weights", "far_table", "aliased"]

_E4M3_MAX = 448.0
_NAN_BYTE = 0xFF
_UNUSED_ENTRY = 2_147_480_000  # of a block table
_SPARE_PAGES = 2  # page 0 and another one, which no request uses
_PAGE_GAP = 48  # bytes between pages of a strided cache
_STEP = 1 << 31
_NEAR_TILES = 4  # that have the keys of "near"
_EMPTY_BLOCKS_OF_A_TILE = 32  # row blocks without keys that cost about as much as a tile
_EXACT_DOTS = 16  # of plateaus: of so many keys one has logits that are not 0
_BROKEN_STEP = 3  # of used entries of a broken table, every third is outside the cache, the second the first


@dataclass(frozen=True)
class LogitsCase(BaseCase):
    """Logits of `tokens` query tokens of each request, one request without pages, for `keys` keys, the most of a request with pages.

    page_size: of an index cache; None: keys lie in a row.
    windows: of rows. "causal": all keys up to the token, the last token sees all; "random": two positions, half of them ks >= ke;
        "sequences": packed sequences of 3 tokens, each with keys of its own; "edges": next to borders of tiles, clipped and crossed ones;
        "near": next to the last key; "last": the last token's are all, the others' none; "empty": none.
    lengths: of requests. "edges": next to borders of pages and tiles, negative ones and more than there are; "near": to 257 of these;
        "last": of the last one all, of the others none.
    per_token: lengths are [requests, tokens].
    columns: max_seqlen_k of rows, None: 0; max_context_len of pages, None: keys.
    values: "exact": sums that fp32 holds whatever their order; "plateau": most logits are 0 or -0; "nan_keys": some keys that are seen hold
        NaN, and all others are exact; "normal": normal numbers with scales of amax / 448.
    layout: "strided": slices; rows of keys and pages further apart than they are long; "far_*": an operand's last row lies FAR_ELEMENTS or
        more from its first; "aliased": all requests have the pages of one.
    broken: every third used entry of the table is outside the cache.
    outputs: far_requests puts the last row far.
    """

    cut_by: ClassVar[str] = "requests"
    tags: ClassVar[Tags] = {
        "windows": str,
        "lengths": lambda lengths: f"{lengths}_lengths",
        "per_token": lambda _: "per_token",
        "columns": lambda columns: f"c{columns}",
        "layout": str,
        "broken": lambda _: "broken",
        **TAGS,
    }

    dtype: str = DTYPE
    heads: int = 64
    requests: int = 1
    tokens: int = 5
    keys: int = 300
    page_size: int | None = None
    windows: KeyWindows = "causal"
    lengths: RequestLengths = "full"
    per_token: bool = False
    columns: int | None = None
    values: LogitsValues = "exact"
    layout: LogitsLayout = "packed"
    broken: bool = False

    @property
    def shape_id(self) -> str:
        """Return the first part of the id."""
        where = "rows" if self.page_size is None else f"p{self.page_size}"
        return f"{where}-b{self.requests}-t{self.tokens}-h{self.heads}-k{self.keys}"

    @property
    def shape(self) -> tuple[int, int]:
        """Return the shape of the logits."""
        return self.requests * self.tokens, self.columns or self.keys

    @property
    def q_shape(self) -> tuple[int, int, int, int]:
        """Return requests, tokens, heads and columns; no heads where the call launches nothing."""
        is_written = self.shape[1] > 0 and (self.page_size is not None or self.keys > 0)
        return self.requests, self.tokens, self.heads if is_written else 0, COLUMNS

    @property
    def table_pages(self) -> int:
        """Return the columns of the block table."""
        return ceil_div(self.keys, self.page_size or 1)

    @property
    def most_keys(self) -> int:
        """Return the most keys that a request can have, by the table and max_context_len."""
        return min(self.shape[1], self.table_pages * (self.page_size or 1))

    @property
    def tiles(self) -> int:
        """Return the cost on the simulated device: a tile of keys and a row block cost about as much as a tile of attention."""
        problem = self._problem
        if "last" in (self.windows, self.lengths):
            return problem.tiles + problem.row_blocks // _EMPTY_BLOCKS_OF_A_TILE
        most = _NEAR_TILES if "near" in (self.windows, self.lengths) else problem.tiles
        return problem.row_blocks * max(min(problem.tiles, most), 1)

    @property
    def finding_kinds(self) -> frozenset[str]:
        """Return the kinds of findings that the simulated device must report."""
        return frozenset({OUTSIDE} if self.broken else ())

    @property
    def _problem(self) -> MqaLogitsProblem:
        paged = self.page_size is not None
        return MqaLogitsProblem(paged, self.heads, self.requests, self.tokens, self.most_keys if paged else self.keys)

    def problem(self, arch: Arch) -> MqaLogitsProblem:
        """Return the shapes of the call."""
        return self._problem


@dataclass(frozen=True)
class MqaLogitsTensors:
    """The operands of a case: of fp8_paged_mqa_logits, with context_lens in the place of ke; or of fp8_mqa_logits.

    q e4m3 [tokens, heads, 128], with pages [requests, tokens, heads, 128]. keys: e4m3 [keys, 128], or the cache. scales: fp32 [keys] or
    None. weights: fp32 [rows, heads]. ks, ke: int32. block_table: int32 [requests, pages] or None.
    """

    q: Tensor
    keys: Tensor
    scales: Tensor | None
    weights: Tensor
    ks: Tensor | None
    ke: Tensor
    block_table: Tensor | None
    output_buffers: Mapping[str, OutputBuffer] = field(default_factory=dict)


@dataclass(frozen=True)
class MqaLogitsCase(LogitsCase):
    """A call of mqa_logits. clean: clean_logits."""

    op: ClassVar[str] = "mqa_logits"
    tags: ClassVar[Tags] = {
        **{name: tag for name, tag in LogitsCase.tags.items() if name in ("windows", "lengths", "per_token")},
        "clean": lambda _: "unclean",
        **LogitsCase.tags,
    }

    clean: bool = True


def make_mqa_logits_tensors(case: LogitsCase, device: str | torch.device = "cpu") -> MqaLogitsTensors:
    """Make the operands of a case: equal for equal cases."""
    device = torch.device(device)
    draw = generator_for(case, 0, torch.device("cpu"))
    rows = case.requests * case.tokens
    q, q_scale = _e4m3_rows(case, (rows, case.heads), draw, sign=1)
    weights = _weights(case, q_scale, draw)
    q = _placed_queries(case, q, device)
    weights = _placed_rows(weights, case.layout == "strided", case.layout == "far_weights", device)
    buffers = sliced_buffers(case.outputs, {"out": (case.shape, torch.float32)}, device)
    if case.page_size is None:
        ks, ke = _windows(case, draw)
        keys, scales = _row_keys(case, ks, ke, draw, device)
        return MqaLogitsTensors(q[0], keys, scales, weights, ks.int().to(device), ke.int().to(device), None, buffers)
    lengths = _lengths(case, draw)
    cache, table = _paged_keys(case, lengths, draw, device)
    return MqaLogitsTensors(q, cache, None, weights, None, lengths.int().to(device), table, buffers)


def _e4m3_rows(case: LogitsCase, shape: tuple[int, ...], draw: torch.Generator, sign: int) -> tuple[Tensor, Tensor]:
    """Draw rows [*shape, 128] of numbers that e4m3 holds, and their scales, fp32 [*shape]. sign: of all numbers of a plateau."""
    if case.values == "normal":
        numbers = torch.randn(*shape, COLUMNS, generator=draw)
        scale = numbers.abs().amax(-1) / _E4M3_MAX
        return (numbers / scale.unsqueeze(-1)).to(torch.float8_e4m3fn), scale
    numbers = torch.randint(-4, 5, (*shape, COLUMNS), generator=draw) * 0.5
    scale = 2.0 ** torch.randint(-6, 7, shape, generator=draw)
    if case.values == "plateau":
        numbers = numbers.abs() * sign
        if sign < 0:
            numbers[::_EXACT_DOTS] *= -1
    return numbers.to(torch.float8_e4m3fn), scale


def _weights(case: LogitsCase, q_scale: Tensor, draw: torch.Generator) -> Tensor:
    """Draw the weights, fp32 [rows, heads], of both signs. q_scale: of normal values."""
    if case.values == "normal":
        return torch.randn(q_scale.shape, generator=draw) * q_scale * (case.heads * COLUMNS) ** -0.5
    powers = 2.0 ** torch.randint(-2, 3, q_scale.shape, generator=draw)
    return powers * (1 - 2 * torch.randint(0, 2, q_scale.shape, generator=draw))


def _placed_queries(case: LogitsCase, q: Tensor, device: torch.device) -> Tensor:
    """Copy q [rows, heads, 128] to its layout, [requests, tokens, heads, 128], with NaN in and around it."""
    shape = (case.requests, case.tokens, case.heads, COLUMNS)
    rows, heads, _ = q.shape
    match case.layout:
        case "strided":
            wide = torch.full((rows + 2, heads + 2, COLUMNS + 16), math.nan, device=device).to(q.dtype)
            placed = wide[1:-1, 1:-1, 16:]
        case "far_q":
            placed = far_tensor(q.shape, 0, q.dtype, device)
        case _:
            placed = torch.empty(q.shape, dtype=q.dtype, device=device)
    placed.view(torch.uint8).copy_(q.view(torch.uint8))
    return placed.unflatten(0, shape[:2])


def _placed_rows(values: Tensor, strided: bool, far: bool, device: torch.device) -> Tensor:
    """Copy values [rows, columns] or [rows] to their layout, with NaN around them."""
    if far:
        return far_tensor(values.shape, 0, values.dtype, device).copy_(values)
    around = 3 if strided else 0
    wide = torch.full((*values.shape[:-1], values.shape[-1] + around), math.nan, device=device)
    return wide[..., around // 2 : around // 2 + values.shape[-1]].copy_(values)


def _windows(case: LogitsCase, draw: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return ks and ke of the tokens of a case without pages, int64 [tokens]."""
    n, tokens = case.keys, case.tokens
    token = torch.arange(tokens)
    match case.windows:
        case "whole":
            pairs = [(0, n)]
        case "empty":
            pairs = [(n, 0), (n // 2, n // 2), (0, -1)]
        case "edges":
            pairs = [(0, 65), (3, 3), (63, 64), (-7, 9), (n - 1, n + 70), (5, 2), (n + 5, n + 9), (1, 129), (128, 129), (127, 257)]
            pairs += [(-_STEP, _STEP - 1), (_STEP - 1, -_STEP), (0, 0), (n - 3, _STEP - 1)]
        case "near":
            pairs = [(n - 257, n + 70), (-7, -3), (n - 300, n - 235), (n + 5, n + 9), (n - 129, n - 1), (n - 1, _STEP - 1)]
        case "last":
            return torch.zeros_like(token), torch.where(token == tokens - 1, n, 0)
        case "random":
            ends = torch.randint(0, n + 1, (2, tokens), generator=draw)
            return ends[0], ends[1]
        case "sequences":
            own = ceil_div(n, max(ceil_div(tokens, 3), 1))
            return token // 3 * own, token // 3 * own + (token % 3 + 1) * own // 3
        case _:
            return torch.zeros_like(token), n - tokens + 1 + token
    return tuple(torch.tensor([pairs[i % len(pairs)][side] for i in range(tokens)], dtype=torch.int64) for side in (0, 1))  # type: ignore[return-value]


def _lengths(case: LogitsCase, draw: torch.Generator) -> Tensor:
    """Return context_lens of a case with pages, int64 [requests] or [requests, tokens]."""
    shape = (case.requests, case.tokens) if case.per_token else (case.requests,)
    count, n = math.prod(shape), case.keys
    kinds = {
        "full": [n],
        "edges": [n, 0, 65, -5, 1, n + 1000, 64, 129, 63, _STEP - 1, 128, 127, -_STEP, 257, n - 1],
        "near": [257, 65, 0, -5, 1, 64, 129, 63, 128, 127, -_STEP],
        "last": [0] * (count - 1) + [n],
        "empty": [0, -3],
        "random": torch.randint(0, n + 1, (max(count, 1),), generator=draw).tolist(),
    }[case.lengths]
    return torch.tensor([kinds[i % len(kinds)] for i in range(count)], dtype=torch.int64).view(shape)


def _drawn_keys(case: LogitsCase, count: int, seen: Tensor, draw: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw the bytes of keys, uint8 [count, 128], and their scales; both NaN of keys not in seen, bool [count]."""
    keys, scales = _e4m3_rows(case, (count,), draw, sign=-1)
    codes = keys.view(torch.uint8)
    if case.values == "nan_keys":
        codes[3::7, 5::9] = _NAN_BYTE
        scales[5::7] = math.nan
    codes[~seen] = _NAN_BYTE
    return codes, scales.masked_fill(~seen, math.nan)


def _row_keys(case: LogitsCase, ks: Tensor, ke: Tensor, draw: torch.Generator, device: torch.device) -> tuple[Tensor, Tensor]:
    """Make keys e4m3 [keys, 128] and scales fp32 [keys]."""
    place = torch.arange(case.keys)
    seen = ((place >= ks.unsqueeze(1)) & (place < ke.unsqueeze(1))).any(0)
    codes, scales = _drawn_keys(case, case.keys, seen, draw)
    if case.layout == "far_keys":
        keys = far_tensor(codes.shape, 0, torch.float8_e4m3fn, device)
    else:
        wide = torch.full((case.keys, COLUMNS + 16), math.nan, device=device).to(torch.float8_e4m3fn)
        keys = wide[:, 16:] if case.layout == "strided" else wide[:, 16:].contiguous()
    keys.view(torch.uint8).copy_(codes)
    return keys, _placed_rows(scales, case.layout == "strided", False, device)


def _paged_keys(case: LogitsCase, lengths: Tensor, draw: torch.Generator, device: torch.device) -> tuple[Tensor, Tensor]:
    """Make the cache, with the keys of the requests on shuffled pages, and the block table."""
    assert case.page_size is not None
    page, most = case.page_size, case.most_keys
    ends = paged_ends(lengths, case.tokens, most).amax(1) if case.tokens else torch.zeros(case.requests, dtype=torch.int64)
    owners = 1 if case.layout == "aliased" else case.requests
    own = ends.amax(0, keepdim=True) if case.layout == "aliased" and case.requests else ends
    counts = [ceil_div(int(end), page) for end in own]
    pages = sum(counts) + _SPARE_PAGES
    cache = _cache(case, pages, device)
    shuffled = torch.randperm(pages - 1, generator=draw) + 1
    shuffled[shuffled == pages - 1], shuffled[0] = int(shuffled[0]), pages - 1  # the last page, which may lie far away, is used
    width = case.table_pages + 3
    shape = (case.requests, width)
    table = (
        far_tensor(shape, 0, torch.int32, device) if case.layout == "far_table" else torch.empty(shape, dtype=torch.int32, device=device)
    )
    table = table.fill_(_UNUSED_ENTRY)[:, : case.table_pages]
    outside = outside_pages(pages, max(case.table_pages, 1)).to(device)
    first = 0
    for owner, count in enumerate(counts[:owners]):
        entries = shuffled[first : first + count]
        codes, scales = _drawn_keys(case, count * page, torch.arange(count * page) < int(own[owner]), draw)
        content = torch.cat([codes.view(count, page * COLUMNS), scales.view(torch.uint8).view(count, page * SCALE_BYTES)], 1)
        cache[entries.to(device)] = content.view(count, page, 1, ROW_BYTES).to(device)
        used = range(case.requests) if case.layout == "aliased" else (owner,)
        for request in used:
            there = ceil_div(int(ends[request]), page)
            table[request, :there] = entries[:there].int().to(device)
            if case.broken:
                table[request, 1:there:_BROKEN_STEP] = outside[1:there:_BROKEN_STEP]
        first += count
    return cache, table


def _cache(case: LogitsCase, pages: int, device: torch.device) -> Tensor:
    """Allocate a cache [pages, page size, 1, 132] in its layout, full of bytes of NaN."""
    assert case.page_size is not None
    own = case.page_size * ROW_BYTES
    stride = own + _PAGE_GAP if case.layout == "strided" else own
    if case.layout == "far_keys":
        stride = ceil_div(FAR_ELEMENTS, (pages - 1) * 16) * 16
    storage = reserve(pages * stride, device)
    shape, strides = (pages, case.page_size, 1, ROW_BYTES), (stride, ROW_BYTES, ROW_BYTES, 1)
    cache = storage.as_strided(shape, strides)
    (cache if case.layout == "far_keys" else storage).fill_(_NAN_BYTE)
    return cache
