"""Choice between the forms of attention for the requests of a step, from numbers that the host knows."""

from __future__ import annotations

from typing import Literal, NamedTuple

from .batch import MlaBatch

Form = Literal["dense", "sparse"]


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
    """Return "sparse" if some token has to choose among its keys, or if only sparse decode reads the cache.

    most_keys: no request has more.
    """
    if sparsity.topk is None:
        return "dense"
    return "dense" if most_keys <= sparsity.topk and sparsity.dense_cache and not sparsity.batch_invariant else "sparse"


def prefill_form(most_keys: int, sparsity: Sparsity) -> Form:
    """Return "sparse" if some token has to choose among its keys. most_keys: no request has more, cached and new."""
    if sparsity.topk is None or (most_keys <= sparsity.topk and not sparsity.batch_invariant):
        return "dense"
    return "sparse"


def forms_of(batch: MlaBatch, keys_per_column: int, sparsity: Sparsity) -> Forms:
    """Return the forms of attention of a step. keys_per_column: of a column of the block table, on all ranks."""
    decode, prefill = batch.decode, batch.prefill
    return Forms(
        decode=None if decode is None else decode_form(decode.most_keys(keys_per_column), sparsity),
        prefill=None if prefill is None else prefill_form(prefill.most_keys, sparsity),
    )
