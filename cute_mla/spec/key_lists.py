"""key_lists: inverts the indices of sparse attention. For each key it lists the (token, slot) pairs that name it, in ascending order.

A list is what a sum over the tokens that chose a key runs over: entry (token - first token) * topk + slot, as one int32. The lists of all
keys lie one behind the other (CSR): those of key s are entries[row_starts[s]] .. entries[row_starts[s + 1] - 1]. Keys are numbered over
the rows of kv: request * s_kv + row, or the row of a packed kv.

Three steps, each a kernel. `count` counts how often each block of BLOCK_TOKENS tokens names each key. `place` turns the counts into the
place of each block's first entry of each key. `fill` writes the entries, a CTA a block, one token after the other. Counters are added to
atomically, but only their final values reach a result, so that the lists do not depend on the order of the additions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

from .abi import Int32, Int64, Pointer, params_of
from .mla import ceil_div

Step = Literal["count", "place", "fill"]

BLOCK_TOKENS = 16  # tokens that one CTA lists in order: fewer cost more counters, more leave SMs idle
PLACE_KEYS = 1024  # keys of a CTA of `place`, a thread each
MAX_ENTRIES = (1 << 31) - 1  # tokens * topk: entries and their places are int32


class KeyListsArguments(NamedTuple):
    """Launch arguments of each step, in ABI order: the one list that host, launch and kernels share."""

    indices: Pointer  # int32 [batch, s_q, topk], counted from the request's first row; an index outside the request's rows is skipped
    topk_length: Pointer  # int32 [batch * s_q], or null: all topk indices count
    kv_offsets: Pointer  # int32 [batch + 1], as in SparsePrefillArguments, or null
    counters: Pointer  # int32 [blocks + 1, keys], 0 before `count`; the last row counts the entries of all blocks
    row_starts: Pointer  # int32 [keys + 1], out
    entries: Pointer  # int32 [tokens * topk], out; what lies behind the last list is not written
    # in elements
    indices_stride_batch: Int64
    indices_stride_token: Int64
    first_token: Int32  # of the tokens that are listed, counted over the batch
    tokens: Int32  # that are listed
    s_q: Int32
    s_kv: Int32  # rows of kv, or without kv_offsets of a request's
    request_keys: Int32  # from a request's first key to the next one's: s_kv, or 0 where kv is packed
    topk: Int32
    keys: Int32  # rows of kv over all requests


PARAMS = params_of(KeyListsArguments)


@dataclass(frozen=True)
class KeyListsConfig:
    """One of the steps."""

    step: Step

    @property
    def name(self) -> str:
        """The kernel's name in the manifest, without op and arch."""
        return self.step


def blocks(tokens: int) -> int:
    """Return the blocks of so many tokens."""
    return ceil_div(tokens, BLOCK_TOKENS)


def grid(step: Step, tokens: int, keys: int) -> tuple[int, int, int]:
    """Return the CTAs of a step along x, y and z. tokens, keys: 1 or more."""
    return {"count": tokens, "place": ceil_div(keys, PLACE_KEYS), "fill": blocks(tokens)}[step], 1, 1


def closed_variants() -> tuple[KeyListsConfig, ...]:
    """Return every variant that ships, on each architecture."""
    return tuple(KeyListsConfig(step) for step in get_args(Step))
