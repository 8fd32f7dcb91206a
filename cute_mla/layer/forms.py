"""Choice between the forms of attention for the requests of a step, from numbers that the host knows."""

from __future__ import annotations

from typing import Literal, NamedTuple

from .batch import MlaBatch

# Dense attention; the kernels of sparse attention, over all keys of a token or over those chosen by an indexer.
Form = Literal["dense", "all", "chosen"]


class Forms(NamedTuple):
    """Forms of attention of a step's decode requests and of its prefill requests; None without any."""

    decode: Form | None
    prefill: Form | None


class Sparsity(NamedTuple):
    """Properties of a layer that decide on a form.

    topk: most keys that a token of the layer attends to; None: all. dense_cache: whether dense decode reads the cache. batch_invariant: the
    form of a request must not depend on the other requests of its batch.
    """

    topk: int | None
    dense_cache: bool
    batch_invariant: bool


def decode_form(most_keys: int, sparsity: Sparsity) -> Form:
    """Return the form for decode requests, none of which has more than so many keys."""
    if sparsity.topk is None:
        return "dense"
    if most_keys > sparsity.topk:
        return "chosen"
    return "dense" if sparsity.dense_cache and not sparsity.batch_invariant else "all"


def prefill_form(most_keys: int, sparsity: Sparsity) -> Form:
    """Return the form for prefill requests, none of which has more than so many keys, cached and new."""
    if sparsity.topk is None:
        return "dense"
    if most_keys > sparsity.topk:
        return "chosen"
    return "all" if sparsity.batch_invariant else "dense"


def forms_of(batch: MlaBatch, keys_per_column: int, sparsity: Sparsity) -> Forms:
    """Return the forms of attention of a step. keys_per_column: of a column of the block table, on all ranks."""
    decode, prefill = batch.decode, batch.prefill
    return Forms(
        decode=None if decode is None else decode_form(decode.most_keys(keys_per_column), sparsity),
        prefill=None if prefill is None else prefill_form(prefill.most_keys, sparsity),
    )
