"""The keys of one tile that a query row sees, as bits."""

from __future__ import annotations

import cutlass
from cutlass import Int32, Int64, Uint32, Uint64, cute

from ...spec.dense_decode import TREE_WORD_TOKENS
from ..attention.scheduler import KeyTile
from ..primitives.arithmetic import clip
from .operands import DenseDecodeOperands

WORD_KEYS = TREE_WORD_TOKENS
ALL_SEEN = -1


@cute.jit
def visible_word(operands: DenseDecodeOperands, keys: KeyTile, token: Int32, first: cutlass.Constexpr[int]) -> Int32:
    """Return the bits of 32 keys of a tile from `first` on: 1 where a query token sees the key."""
    word = word_below(operands.key_limit(keys, token) - first)
    if cutlass.const_expr(operands.key_masks):
        word = word & _unmasked_word(operands, keys, token, first)
    return word


@cute.jit
def _unmasked_word(operands: DenseDecodeOperands, keys: KeyTile, token: Int32, first: cutlass.Constexpr[int]) -> Int32:
    """Return the bits of 32 keys that neither a tree mask nor a window hides."""
    word = Int32(ALL_SEEN)
    if operands.has_tree():
        word = tree_word(operands, keys, token, first)
    if operands.has_window():
        sinks, windows = operands.unseen_keys(keys)
        word = word & (word_below(sinks - first) | ~word_below(windows + token - first))
    return word


def word_below(count: Int32) -> Int32:
    """Return a word whose first `count` bits are 1; none if negative, all if more than 32."""
    return Int32((Int64(1) << Int64(clip(count, Int32(WORD_KEYS)))) - 1)


def tree_word(operands: DenseDecodeOperands, keys: KeyTile, token: Int32, first: int) -> Int32:
    """Return the bits of 32 keys of a tile by a token's tree mask. Keys before the new tokens are 1; those past the end may be.

    Tokens that a request or unit lacks have the bits of some other one.
    """
    args = operands.args
    new_tokens, base = operands.units.new_tokens_and_base(keys.req, args.hidden_keys)
    own = clip(base + token, args.total_q - 1)
    words = args.tree_mask + (Int64(keys.req) * args.tree_stride_batch + Int64(own) * args.tree_stride_token)
    key = new_tokens - keys.remaining + first  # the first key among the new tokens; negative for an earlier one
    begin, shift = key >> (WORD_KEYS.bit_length() - 1), Uint64(key & (WORD_KEYS - 1))
    low, high = (Uint64(Uint32(stored_word(words, begin + i, new_tokens))) for i in range(2))
    return Int32(((high << WORD_KEYS) | low) >> shift)


@cute.jit
def stored_word(words: cute.Pointer, index: Int32, tokens: Int32) -> Int32:
    """Return a word of a token's mask: all ones before the first, 0 after the last, of which nothing is read."""
    word = Int32(0)
    if index < 0:
        word = Int32(ALL_SEEN)
    elif index * WORD_KEYS < tokens:
        word = (words + index).load()
    return word
