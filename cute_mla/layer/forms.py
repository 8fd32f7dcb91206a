"""Choice between the forms of attention for the requests of a step, from numbers that the host knows."""

from __future__ import annotations

from typing import Literal, NamedTuple

from ..spec.dense_decode import TILE_ROWS
from ..spec.mla import ceil_div
from .batch import MlaBatch, PrefillRequests

# Dense attention; the kernels of sparse attention, over all keys of a token or over those chosen by an indexer; of prefill, dense attention
# with a mask of the chosen keys.
Form = Literal["dense", "all", "chosen", "masked"]

# Keys that masked prefill takes for a row of a head in the time in which sparse prefill takes one for all rows of a tile of heads. By the
# clock 224 on an H200 and 311 on a B200 (profiles/NOTES.md, `A mask of keys in dense prefill`); the mask is made of the chosen keys first.
MASKED_KEYS = 200


class Forms(NamedTuple):
    """Forms of attention of a step's decode requests and of its prefill requests; None without any."""

    decode: Form | None
    prefill: Form | None

    @property
    def is_chosen(self) -> bool:
        """Return whether tokens attend to keys that an indexer chooses."""
        return not {"chosen", "masked"}.isdisjoint(self)

    @property
    def is_sparse(self) -> bool:
        """Return whether attention of a config with an indexer is another than dense attention."""
        return self.is_chosen or "all" in self


class Sparsity(NamedTuple):
    """Properties of a layer that decide on a form.

    topk: most keys that a token of the layer attends to; None: all. dense_cache: whether dense decode reads the cache. batch_invariant: the
    form of a request must not depend on the other requests of its batch. masked_heads: the layer's heads, if dense prefill of them takes
    masks; else None.
    """

    topk: int | None
    dense_cache: bool
    batch_invariant: bool
    masked_heads: int | None = None


def decode_form(most_keys: int, sparsity: Sparsity) -> Form:
    """Return the form for decode requests, none of which has more than so many keys."""
    if sparsity.topk is None:
        return "dense"
    if most_keys > sparsity.topk:
        return "chosen"
    return "dense" if sparsity.dense_cache and not sparsity.batch_invariant else "all"


def prefill_form(requests: PrefillRequests, sparsity: Sparsity) -> Form:
    """Return the form for prefill requests."""
    if sparsity.topk is None:
        return "dense"
    if requests.most_keys <= sparsity.topk:
        return "all" if sparsity.batch_invariant else "dense"
    return "masked" if _masks_pay(requests, sparsity.topk, sparsity) else "chosen"


def _masks_pay(requests: PrefillRequests, topk: int, sparsity: Sparsity) -> bool:
    """Return whether masked prefill of the longest request, over all keys that a token sees, is faster than sparse prefill over topk keys.

    Masked prefill takes heads one by one, sparse prefill tiles of them.
    """
    if sparsity.masked_heads is None or sparsity.batch_invariant:
        return False
    seen = requests.most_keys - requests.max_seqlen // 2  # by a token of the request, on average
    return sparsity.masked_heads * seen <= MASKED_KEYS * topk * ceil_div(sparsity.masked_heads, TILE_ROWS)


def forms_of(batch: MlaBatch, keys_per_column: int, sparsity: Sparsity) -> Forms:
    """Return the forms of attention of a step. keys_per_column: of a column of the block table, on all ranks."""
    decode, prefill = batch.decode, batch.prefill
    return Forms(
        decode=None if decode is None else decode_form(decode.most_keys(keys_per_column), sparsity),
        prefill=None if prefill is None else prefill_form(prefill, sparsity),
    )
