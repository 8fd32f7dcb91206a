"""Tensors that the cases of several ops share: q, scores that depend on a key's position, and results in their layouts.

Every element in and around a tensor is NaN before it gets its value.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import log, nan
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from ...spec.dense_decode import MAX_ROW_ALIGNMENT
from ...spec.mla import D_ROPE
from ...spec.split_plan import TILE_KEYS
from .base import DTYPES, EVEN_ELEMENTS, BaseCase, DecodeCase, Outputs, QLayout
from .far import FAR_DIMENSIONS, far_tensor

_CPU_ELEMENTS = 1 << 25  # up to this size the CPU draws a tensor, so that every device gets the same bits
PREFILL_TILE_KEYS = 128  # of a tile of dense prefill
STEEP = 4.0  # of ramped values: rotary columns of q, and the bound of those of k; scores span +-43 at the default scale
STEP = 0.25  # of "steps": by how much rotary columns of keys grow from tile to tile
NEEDLE, HIGHEST_NEEDLE = 2.0, 3  # of "needles": the rotary column of a key in units, and the most units
OPPOSED_ROWS = 8  # neighbouring query rows whose scores take the same direction; a thread of Hopper's tensor cores has rows r and r + 8
CLIFF_BITS = 10  # of a key's position, from which "cliff" makes its score
# Scale for "cliff" that makes a key's score 130 powers of two greater than that of the key before: all others have no weight beside it.
CLIFF_SCALE = 130 * log(2) * (1 << CLIFF_BITS - 1) / STEEP**2
RAMPED = ("rising", "falling", "peaks", "opposed", "steps", "needles", "cliff")  # values whose scores depend on the position of the key
ORDERED = ("rising", "falling", "opposed", "steps", "needles")  # of these, values whose indices ascend in sparse ops
OUTSIDE = "block_table"  # kind of the finding that a used block-table entry outside the cache is


UNTOUCHED = -0x5A5A5A5B  # integers that no call returns


def make_untouched(tensor: Tensor) -> None:
    """Fill a tensor with NaN, one of integers with a number that no call returns."""
    tensor.fill_(float("nan") if tensor.is_floating_point() else UNTOUCHED)


def is_untouched(tensor: Tensor) -> bool:
    """Return whether a tensor is as make_untouched leaves it."""
    return bool((tensor.isnan() if tensor.is_floating_point() else tensor == UNTOUCHED).all())


class OutputBuffer(NamedTuple):
    """A result tensor that the caller passes, full of NaN, and the storage that it is a slice of."""

    tensor: Tensor
    storage: Tensor


class Operands(Protocol):
    """The tensors of a call of any op."""

    @property
    def output_buffers(self) -> Mapping[str, OutputBuffer]:
        """Return by name the results that the caller passes; the call allocates all others."""


class Fp32Result(NamedTuple):
    """A result beside out. shape: [b, x, y]; dense: the dimension, 1 or 2, along which elements are neighbours in memory.

    heads: the dimension of the heads, 1 or 2; the other is that of the query tokens.
    """

    shape: tuple[int, int, int]
    dense: int
    heads: int


def generator_for(case: BaseCase, elements: int, device: torch.device, offset: int = 0) -> torch.Generator:
    """Return the generator for a tensor of a case with this many elements. Each tensor of a case has an offset of its own."""
    home = torch.device("cpu") if elements <= _CPU_ELEMENTS else device
    return torch.Generator(home).manual_seed(case.seed + offset)


def normal_values(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Draw fp32 values: N(0, 1)/10 clamped to +-1."""
    return torch.randn(shape, generator=generator, device=generator.device).div_(10).clamp_(-1, 1)


def ramp_direction(device: torch.device) -> Tensor:
    """Return fp32 [64] of +1 and -1: the direction of the ramps in the rotary columns of q and k."""
    return 1.0 - 2.0 * (torch.arange(D_ROPE, device=device) % 3 == 0)


def draw_queries(values: str, shape: tuple[int, ...], generator: torch.Generator, tile_keys: int = TILE_KEYS) -> Tensor:
    """Draw q, fp32 [.., tokens, heads, d_qk]. For ramped values the rotary columns decide on the scores.

    Of values without another random part, rows depend on request, token and head. tile_keys: of "needles", as in needles.
    """
    q = normal_values(shape, generator)
    if values not in RAMPED:
        return q
    tokens, heads = torch.arange(shape[-3], device=q.device)[:, None], torch.arange(shape[-2], device=q.device)
    requests = torch.arange(shape[0], device=q.device)[:, None, None] if len(shape) > 3 else torch.zeros_like(tokens)
    q[..., -D_ROPE:] = STEEP * ramp_direction(q.device)
    falls = (tokens + heads) // OPPOSED_ROWS
    if values == "steps":
        falls = falls + requests
    falls = (falls % 2)[..., None]  # [.., tokens, heads, 1], of values that differ so
    if values == "steps":
        q[..., -D_ROPE:] *= 1 - 2 * falls
    if values == "opposed":
        q[..., -D_ROPE:] *= falls == torch.arange(D_ROPE, device=q.device) // (D_ROPE // 2)
    if values in ("steps", "needles", "cliff"):
        q[..., :-D_ROPE] = 0
    if values == "needles":
        rows = tokens * (shape[-2] + (shape[-2] % tile_keys == 0)) + heads + 11 * requests
        q[..., -tile_keys:] = STEEP * functional.one_hot(_needle_column(rows, tile_keys), tile_keys)
    if values == "cliff":
        weights = torch.zeros(D_ROPE, device=q.device)
        weights[:CLIFF_BITS] = STEEP * 2.0 ** (torch.arange(CLIFF_BITS, device=q.device) - CLIFF_BITS + 1)
        q[..., -D_ROPE:] = weights
    return q


def _needle_column(rows: Tensor, tile_keys: int) -> Tensor:
    """Return the column of q that is not 0 in these rows: another one in each of tile_keys neighbouring rows.

    In a thread of Hopper's tensor cores, whose keys are two in eight, every register of either of its rows has the needle of some row.
    """
    eight, row = rows // 8, rows % 8
    return (eight + row // 2) % (tile_keys // 8) * 8 + row


def score_levels(values: str, position: Tensor, length: int, step: float, generator: torch.Generator) -> Tensor:
    """Return the level of each key's score by its position: -STEEP to STEEP, but for "steps", which grow without a bound."""
    if values == "steps":
        return position // TILE_KEYS * step
    fraction = position / max(length - 1, 1)
    if values == "rising":
        return (2 * fraction - 1) * STEEP
    if values == "falling":
        return (1 - 2 * fraction) * STEEP
    peak = torch.rand(fraction.shape, generator=generator, device=generator.device) < 0.02
    return torch.where(peak, STEEP, 0.0)


def ramp_keys(values: str, keys: Tensor, length: int, generator: torch.Generator, step: float = STEP, backwards: bool = False) -> None:
    """Set the rotary columns of keys [n, .., d_qk] so that scores follow `values`, one of RAMPED, over `length` keys.

    step: of "steps". backwards: "needles" grow from the last key to the first, in tiles of PREFILL_TILE_KEYS.
    """
    position = torch.arange(len(keys), device=keys.device)
    if values == "needles":
        columns = needles(position, length if backwards else None)
    elif values == "cliff":
        columns = STEEP * functional.pad(position[:, None] >> torch.arange(CLIFF_BITS, device=keys.device) & 1, (0, D_ROPE - CLIFF_BITS))
    elif values == "opposed":
        fraction = position / max(length - 1, 1)
        rising, falling = (2 * ((walked - 0.1) / 0.4).clamp(0, 1) - 1 for walked in (fraction, 1 - fraction))
        halves = torch.stack([rising, falling], 1).repeat_interleave(D_ROPE // 2, 1)
        columns = STEEP * halves * ramp_direction(keys.device)
    else:
        columns = score_levels(values, position, length, step, generator)[:, None] * ramp_direction(keys.device)
    keys[..., -columns.shape[-1] :] = columns.view(-1, *[1] * (keys.dim() - 2), columns.shape[-1])


def needles(position: Tensor, length: int | None) -> Tensor:
    """Return the last columns of keys, fp32 [n, keys of a tile], one of them not 0: a row has a high score with one key of every tile.

    The key's place in its tile differs from row to row and, by 8, from tile to tile. Scores grow from tile to tile, up to the third; if a
    length is given, in the walk from the last of so many keys to the first, in tiles of PREFILL_TILE_KEYS.
    """
    tile_keys = TILE_KEYS if length is None else PREFILL_TILE_KEYS
    tile = position // tile_keys
    height = tile.clamp(max=HIGHEST_NEEDLE - 1) + 1 if length is None else (length - 1) // tile_keys - tile + 1
    return functional.one_hot((position + tile * OPPOSED_ROWS) % tile_keys, tile_keys) * (NEEDLE * height)[:, None]


def nan_tensor(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Allocate a tensor full of NaN."""
    return torch.full(shape, float("nan"), dtype=dtype, device=device)


def sliced_buffers(
    outputs: Outputs, results: Mapping[str, tuple[tuple[int, ...], torch.dtype]], device: torch.device, far: int = 0
) -> dict[str, OutputBuffer]:
    """Allocate the results that the caller passes, of any shapes; those of "strided" and "odd" are slices of longer rows.

    far: the dimension in which results of the layouts "far_*" lie far. Floats are NaN.
    """
    if outputs == "allocated":
        return {}
    before, after = {"strided": (8, 8), "odd": (1, 2)}.get(outputs, (0, 0))
    buffers = {}
    for name, (shape, dtype) in results.items():
        if outputs.startswith("far"):
            storage = far_tensor(shape, far, dtype, device)
        else:
            fill = nan if dtype.is_floating_point else 0
            storage = torch.full((*shape[:-1], before + shape[-1] + after), fill, dtype=dtype, device=device)
        buffers[name] = OutputBuffer(storage[..., before : before + shape[-1]], storage)
    return buffers


def outside_pages(pages: int, count: int) -> Tensor:
    """Return int32 [count]: numbers that name no page of a cache of `pages` pages, those next to the valid ones first."""
    return torch.tensor([pages, -1, -(1 << 31), (1 << 31) - 1])[torch.arange(count) % 4].int()


def allocate_q(case: BaseCase, device: torch.device) -> Tensor:
    """Allocate q [b, s_q, h_q, d_qk] in its layout, with NaN in and around it."""
    return allocate_rows(case.q_layout, case.q_shape, case.q_dtype, device)


def allocate_rows(layout: QLayout, shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Allocate an operand [b, tokens, heads, columns] in a layout of q, with NaN in and around it."""
    batch, tokens, heads, columns = shape
    match layout:
        case "packed":
            return nan_tensor(shape, dtype, device)
        case "sliced":
            before = MAX_ROW_ALIGNMENT // dtype.itemsize  # no multiple of a sector of L2
            return nan_tensor((batch, tokens, heads + 2, columns + 64), dtype, device)[:, :, 1:-1, before : before + columns]
        case "even":
            return nan_tensor((batch, tokens, heads, columns + 2), dtype, device)[..., 2:]
        case "heads_first":
            return nan_tensor((heads, batch, tokens, columns), dtype, device).permute(1, 2, 0, 3)
        case far:
            return far_tensor(shape, FAR_DIMENSIONS.index(far), dtype, device)


def packed_queries(case: DecodeCase, q: Tensor, values: Tensor) -> Tensor:
    """Copy values, those of all query tokens [.., h_q, d_qk], to q, and return q as the call takes it: [total_q, h_q, d_qk] if packed."""
    if case.tokens is None:
        return q.copy_(values)
    q[0, : case.used_tokens] = values.flatten(0, -3).to(q)
    return q[0]


def decode_outputs(case: DecodeCase, device: torch.device) -> dict[str, OutputBuffer]:
    """Allocate out and lse of a decode call, if the caller passes them."""
    lse = Fp32Result(case.lse_shape, 1, 1 if case.tokens is None else 2)
    return allocate_output_buffers(case, device, {"lse": lse}, drop_batch=case.tokens is not None)


def token_offsets(case: DecodeCase, device: torch.device) -> Tensor | None:
    """Return cu_seqlens_q of a case with packed query tokens, int32 [requests + 1]."""
    return None if case.tokens is None else torch.tensor(case.offsets, dtype=torch.int32, device=device)


def allocate_output_buffers(
    case: BaseCase, device: torch.device, fp32: Mapping[str, Fp32Result], *, drop_batch: bool = False
) -> dict[str, OutputBuffer]:
    """Allocate out [b, s_q, h_q, d_v] and the fp32 results if the caller passes them; drop_batch: without their first dimension."""
    if case.outputs == "allocated":
        return {}
    shape, dtype = (*case.q_shape[:3], case.d_v), DTYPES[case.dtype]
    buffers = {"out": rows_buffer(case.outputs, shape, dtype, device)}
    buffers |= {name: fp32_buffer(case.outputs, result, device) for name, result in fp32.items()}
    return {name: without_batch(buffer) for name, buffer in buffers.items()} if drop_batch else buffers


def without_batch(buffer: OutputBuffer) -> OutputBuffer:
    """Drop the first dimension of a result, which has one index."""
    return buffer._replace(tensor=buffer.tensor[0])


def rows_buffer(outputs: Outputs, shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device) -> OutputBuffer:
    """Allocate a result [b, tokens, heads, columns] in a layout of `outputs`."""
    batch, tokens, heads, columns = shape
    if outputs == "given":
        out = nan_tensor(shape, dtype, device)
        return OutputBuffer(out, out)
    if outputs in FAR_DIMENSIONS:
        out = far_tensor(shape, FAR_DIMENSIONS.index(outputs), dtype, device)
        return OutputBuffer(out, out)
    before = {"strided": MAX_ROW_ALIGNMENT // dtype.itemsize, "even": EVEN_ELEMENTS, "odd": 0}[outputs]
    around = {"strided": 64, "even": 2 * EVEN_ELEMENTS, "odd": 1}[outputs]
    out = nan_tensor((batch, tokens, heads + 1, columns + around), dtype, device)
    return OutputBuffer(out[:, :, 1:, before : before + columns], out)


def fp32_buffer(outputs: Outputs, result: Fp32Result, device: torch.device) -> OutputBuffer:
    """Allocate an fp32 result in a layout of `outputs`."""
    shape, dense, heads = result
    if outputs == "given":
        packed = nan_tensor(shape, torch.float32, device)
        return OutputBuffer(packed, packed)
    if outputs in FAR_DIMENSIONS:
        far = far_tensor(shape, {"far_requests": 0, "far_tokens": 3 - heads, "far_heads": heads}[outputs], torch.float32, device)
        return OutputBuffer(far, far)
    storage = nan_tensor((shape[0], shape[3 - dense], shape[dense] + 3), torch.float32, device)
    view = storage[..., 1:-2]
    return OutputBuffer(view if dense == 2 else view.transpose(1, 2), storage)
