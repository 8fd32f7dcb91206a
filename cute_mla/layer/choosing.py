"""Choice of the keys that tokens attend to: all, those that the layer's indexer chooses, or those that a layer before it chose."""

from __future__ import annotations

from typing import NamedTuple

import torch

from .batch import DecodeRequests, MlaBatch, PrefillRequests
from .forms import Forms
from .index_keys import IndexRows
from .indexer import Indexer, IndexQueries
from .key_masks import mask_of_rows
from .path import AttentionPath, Cache
from .pools import Pools, choose_pooled_rows, choose_pooled_slots
from .rope import Rotation
from .selection import ChosenKeys, KeyMasks, KeyRows, every_row, row_counts


class Indexed(NamedTuple):
    """Results of an indexer for the tokens of a step, and its cache. keys: [tokens, 128], projected; queries: if tokens choose by them.

    pools: the cache of an indexer of pools, in place of the other.
    """

    indexer: Indexer
    rotation: Rotation
    keys: torch.Tensor
    queries: IndexQueries | None
    cache: torch.Tensor | None
    pools: Pools | None = None


class Step(NamedTuple):
    """A step of one layer. topk: most keys that a token attends to, None: all. indexed: None for a layer without an indexer of its own."""

    path: AttentionPath
    cache: Cache
    batch: MlaBatch
    forms: Forms
    topk: int | None
    indexed: Indexed | None


def choose_slots(step: Step, requests: DecodeRequests) -> ChosenKeys:
    """Return the keys of decode requests, and leave them to the layers behind this one. ValueError if nobody has chosen."""
    selection, page_size = step.batch.selection, step.cache.keys.shape[1]
    topk, queries, index_cache = _operands(step)
    if step.forms.decode == "all":
        selection.decode = selection.decode or step.path.every_slot(requests, page_size, topk)
    elif queries is not None and (pools := _pools(step)) is not None:
        own = IndexQueries(*(part[: requests.tokens] for part in queries))
        selection.decode = choose_pooled_slots(step.path, own, pools, requests, page_size)
    elif queries is not None and index_cache is not None:
        own = IndexQueries(*(part[: requests.tokens] for part in queries))
        selection.decode = step.path.choose_slots(own, index_cache, requests, topk)
    return _chosen(selection.decode)


def choose_rows(step: Step, requests: PrefillRequests) -> ChosenKeys:
    """Return the keys of prefill requests, and leave them to the layers behind this one. ValueError if nobody has chosen."""
    selection, rows = step.batch.selection, rows_of(step, requests)
    topk, queries, _ = _operands(step)
    if step.forms.prefill == "all":
        selection.prefill = selection.prefill or every_row(rows, topk)
    elif queries is not None:
        own, pools = IndexQueries(*(part[step.batch.tokens - requests.tokens :] for part in queries)), _pools(step)
        if pools is not None:
            selection.prefill = choose_pooled_rows(step.path, own, pools, requests, rows)
            return selection.prefill
        positions = step.path.choose_rows(own, _index_rows(step, requests), rows, requests.most_keys, topk)
        indices = torch.where(positions < 0, positions, positions + rows.first.unsqueeze(1))
        selection.prefill = ChosenKeys(indices.unsqueeze(1), row_counts(rows, topk))
    return _chosen(selection.prefill)


def mask_keys(step: Step, requests: PrefillRequests) -> tuple[torch.Tensor, ...]:
    """Return masks of the keys of prefill requests, and leave them to the layers that share these keys. ValueError if nobody has chosen.

    One mask is over the new tokens' keys, then there is one for each chunk of cached keys: int32 [tokens, words].
    """
    selection, chosen = step.batch.selection, choose_rows(step, requests)
    if selection.masks is None or selection.masks.chosen is not chosen:
        keys = (requests.max_seqlen, *(chunk.max_seqlen for chunk in requests.chunks))
        parts = zip(rows_of(step, requests).parts, keys, strict=True)
        selection.masks = KeyMasks(chosen, tuple(mask_of_rows(chosen, firsts, number) for firsts, number in parts))
    return selection.masks.masks


def rows_of(step: Step, requests: PrefillRequests) -> KeyRows:
    """Return the rows of all keys of prefill requests, which are laid out once for all layers of a step."""
    rows = step.batch.selection.rows
    if rows is None:
        rows = step.batch.selection.rows = requests.rows()
    return rows


def _operands(step: Step) -> tuple[int, IndexQueries | None, torch.Tensor | None]:
    """Return topk, and the queries and the cache of the layer's indexer, None without one."""
    if step.topk is None:
        raise ValueError("the config has no indexer; supported: a choice of keys by a config with index_topk")
    return (step.topk, None, None) if step.indexed is None else (step.topk, step.indexed.queries, step.indexed.cache)


def _pools(step: Step) -> Pools | None:
    return None if step.indexed is None else step.indexed.pools


def _index_rows(step: Step, requests: PrefillRequests) -> IndexRows:
    """Return the indexer's keys of prefill requests, cached and new, in the order of KeyRows."""
    indexed, rows = step.indexed, rows_of(step, requests)
    if indexed is None:
        raise ValueError("the layer has no indexer; supported: rows of keys of one")
    first = step.batch.tokens - requests.tokens
    own = indexed.indexer.rows(indexed.keys[first:], Rotation(indexed.rotation.cos[first:], indexed.rotation.sin[first:]))
    if not requests.chunks or indexed.cache is None:
        return own
    values, scales = own.values.view(torch.uint8), own.scales
    values = values.new_empty(rows.total, values.shape[1]).index_copy_(0, rows.own, values)
    scales = scales.new_empty(rows.total).index_copy_(0, rows.own, scales)
    for chunk, places in zip(requests.chunks, rows.chunks, strict=True):
        cached = step.path.gather_index(indexed.cache, chunk)
        values.index_copy_(0, places, cached.values.view(torch.uint8))
        scales.index_copy_(0, places, cached.scales)
    return IndexRows(values.view(torch.float8_e4m3fn), scales)


def _chosen(keys: ChosenKeys | None) -> ChosenKeys:
    if keys is None:
        raise ValueError("the layer has no indexer, and batch.selection is empty; supported: behind a layer with an indexer, in one step")
    return keys
