"""Triton kernels of a plain MLA decode: keys split over programs, pages by table, one block of query rows a program.

    part[split] = softmax(scale q k^T) v over the split's keys;  out = sum_s w_s part[s] / sum_s w_s

Rows are the (query token, head) pairs of a request, so that q [batch, s_q, h_q, 576] is [batch, rows, 576]. Nothing is tuned for
a GPU: Triton chooses layouts and loads.
"""

from __future__ import annotations

import triton
import triton.language as tl

LATENT = tl.constexpr(512)
ROPE = tl.constexpr(64)
COLUMNS = tl.constexpr(576)


@triton.jit
def decode_split(
    q: tl.tensor,
    k_cache: tl.tensor,
    table: tl.tensor,
    lengths: tl.tensor,
    out_parts: tl.tensor,
    lse_parts: tl.tensor,
    scale_log2: tl.tensor,
    table_stride: tl.tensor,
    rows: tl.tensor,
    s_q: tl.tensor,
    splits: tl.tensor,
    PAGE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
) -> None:
    """Compute one split of one block of rows. out_parts fp32 [batch, splits, rows, 512], lse_parts fp32 [batch, splits, rows], base 2."""
    request, split = tl.program_id(0), tl.program_id(2)
    row = tl.program_id(1) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    exists = row < rows
    latent, rope = tl.arange(0, LATENT), tl.arange(0, ROPE) + LATENT
    own = (request.to(tl.int64) * rows + row) * COLUMNS
    q_latent = tl.load(q + own[:, None] + latent[None, :], mask=exists[:, None], other=0.0)
    q_rope = tl.load(q + own[:, None] + rope[None, :], mask=exists[:, None], other=0.0)

    length = tl.load(lengths + request)
    share = tl.cdiv(tl.cdiv(length, BLOCK_KEYS), splits) * BLOCK_KEYS
    begin = split * share
    end = tl.minimum(begin + share, length)
    visible_end = length - (s_q - 1 - row // (rows // s_q))
    greatest = tl.full([BLOCK_ROWS], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_ROWS], tl.float32)
    sums = tl.zeros([BLOCK_ROWS, LATENT], tl.float32)
    for first in range(begin, end, BLOCK_KEYS):
        key = first + tl.arange(0, BLOCK_KEYS)
        page = tl.load(table + request * table_stride + key // PAGE, mask=key < end, other=0)
        slot = (page.to(tl.int64) * PAGE + key % PAGE) * COLUMNS
        k_latent = tl.load(k_cache + slot[:, None] + latent[None, :], mask=(key < end)[:, None], other=0.0)
        k_rope = tl.load(k_cache + slot[:, None] + rope[None, :], mask=(key < end)[:, None], other=0.0)
        scores = tl.dot(q_latent, tl.trans(k_latent)) + tl.dot(q_rope, tl.trans(k_rope))
        visible = (key < end)[None, :] & (key[None, :] < visible_end[:, None])
        scores = tl.where(visible, scores * scale_log2, float("-inf"))
        highest = tl.maximum(greatest, tl.max(scores, 1))
        base = tl.where(highest == float("-inf"), 0.0, highest)
        weights = tl.exp2(scores - base[:, None])
        faded = tl.exp2(greatest - base)
        total = total * faded + tl.sum(weights, 1)
        sums = sums * faded[:, None] + tl.dot(weights.to(k_latent.dtype), k_latent)
        greatest = highest

    empty = total == 0.0
    total = tl.where(empty, 1.0, total)
    part = (request.to(tl.int64) * splits + split) * rows + row
    tl.store(out_parts + part[:, None] * LATENT + latent[None, :], sums / total[:, None], mask=exists[:, None])
    tl.store(lse_parts + part, tl.where(empty, float("-inf"), greatest + tl.log2(total)), mask=exists)


@triton.jit
def merge_splits(
    out_parts: tl.tensor,
    lse_parts: tl.tensor,
    out: tl.tensor,
    lse: tl.tensor,
    rows: tl.tensor,
    heads: tl.tensor,
    splits: tl.tensor,
    LN2: tl.constexpr,
) -> None:
    """Merge the splits of one row. out [batch, rows, 512]; lse fp32 [batch, heads, s_q], natural log, +inf for a row without keys."""
    request, row = tl.program_id(0), tl.program_id(1)
    column = tl.arange(0, LATENT)
    greatest = tl.full([], float("-inf"), tl.float32)
    first = request.to(tl.int64) * splits * rows + row
    for split in range(splits):
        greatest = tl.maximum(greatest, tl.load(lse_parts + first + split * rows))
    base = tl.where(greatest == float("-inf"), 0.0, greatest)
    total = tl.zeros([], tl.float32)
    sums = tl.zeros([LATENT], tl.float32)
    for split in range(splits):
        part = first + split * rows
        weight = tl.exp2(tl.load(lse_parts + part) - base)
        total += weight
        sums += weight * tl.load(out_parts + part * LATENT + column)
    empty = total == 0.0
    total = tl.where(empty, 1.0, total)
    own = request.to(tl.int64) * rows + row
    tl.store(out + own * LATENT + column, (sums / total).to(out.dtype.element_ty))
    token, head = row // heads, row % heads
    place = (request * heads + head) * (rows // heads) + token
    tl.store(lse + place, tl.where(empty, float("inf"), (greatest + tl.log2(total)) * LN2))
