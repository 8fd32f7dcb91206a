"""Latent keys of one layer in pages, as a layer of transformers' DynamicCache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers.cache_utils import Cache, DummyLayer, DynamicIndexedLayer, DynamicLayer, DynamicSlidingWindowLayer

from ...layer import PooledIndexCache
from ...spec.mqa_logits import COLUMNS, ROW_BYTES

PAGE_SIZE = 64
RING = 64  # places of a request's tail of pools
# Cache layers without contents that a LatentCacheLayer takes the place of; of those with a window it keeps all keys
_REPLACED = (DynamicLayer, DynamicIndexedLayer, DynamicSlidingWindowLayer)


class LatentCacheLayer(DynamicLayer):
    """Cache layer that a patched attention module writes.

    keys: [batch * pages per request, 64, 1, latent + rotary columns], or no columns where another layer has them; request b has the pages
    from b * pages per request on. Padding tokens take no rows: a request's keys are its first `lengths[b]` rows.

    index_keys: uint8 [batch * pages per request, 64, 1, 132], the keys of the layer's indexer in the same rows; None without an indexer.
    Of an indexer of pools, its pages hold a key for each `pool` tokens, and tail [batch, 64, 256] the last tokens of each request.
    seen: tokens of each request so far, padding included, as transformers counts them. lengths: keys of each request.
    unpadded: the most recent tokens that are padding in no request; crop() removes no more than these. removed: tokens that crop() removed
    and that others have not replaced since; the tail has lost as many of those before.
    """

    keys: torch.Tensor | None
    values: torch.Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.index_keys: torch.Tensor | None = None
        self.tail: torch.Tensor | None = None
        self.pool = 0
        self.seen = 0
        self.lengths: list[int] = []
        self.unpadded = self.removed = 0

    @property
    def pages(self) -> int:
        """Return the pages of each request."""
        return 0 if self.keys is None else self.keys.shape[0] // len(self.lengths)

    @property
    def index_cache(self) -> torch.Tensor | PooledIndexCache | None:
        """Return the cache of the layer's indexer, None without one."""
        if self.index_keys is None or self.tail is None:
            return self.index_keys
        table = torch.arange(len(self.index_keys), dtype=torch.int32, device=self.index_keys.device)
        return PooledIndexCache(self.index_keys, self.tail, table.view(len(self.lengths), -1))

    def reserve(self, batch: int, tokens: int, like: torch.Tensor, columns: int, pool: int) -> None:
        """Make room for this many more tokens of each request. like: a tensor with dtype and device of the keys.

        columns: of a key. pool: tokens of a key of the layer's indexer, 0 without one. Pages grow by half or more, so that a token is
        copied a bounded number of times. Raises ValueError if the cache holds another number of requests.
        """
        if self.keys is None:
            self.lengths = [0] * batch
        elif batch != len(self.lengths):
            raise ValueError(f"the batch has {batch} requests, and the cache {len(self.lengths)}; supported: as many")
        held = self.pages
        needed = -(-(self.seen + tokens) // PAGE_SIZE)
        if needed <= held:
            return
        pages = max(needed, held + held // 2)
        self.keys = self._grown(self.keys, pages, like.new_empty(0, PAGE_SIZE, 1, columns))
        self.pool = pool
        if pool:
            page = like.new_empty(0, PAGE_SIZE, 1, ROW_BYTES, dtype=torch.uint8)
            self.index_keys = self._grown(self.index_keys, -(-pages // pool), page)
        if pool > 1 and self.tail is None:
            self.tail = like.new_zeros(batch, RING, 2 * COLUMNS, dtype=torch.float32)
        self.values = like.new_empty(0)
        self.device, self.is_initialized = like.device, True

    def _grown(self, held: torch.Tensor | None, pages: int, page: torch.Tensor) -> torch.Tensor:
        """Return so many pages of each request, the first ones with what is held. page: an empty tensor of such pages."""
        batch = len(self.lengths)
        grown = page.new_empty(batch, pages, *page.shape[1:])
        if held is not None:
            rows = held.unflatten(0, (batch, -1))
            grown[:, : rows.shape[1]] = rows
        return grown.flatten(0, 1)

    def append(self, tokens: int, new: list[int]) -> None:
        """Count tokens that were written. new: those of each request that are no padding."""
        self.seen += tokens
        self.lengths = [length + count for length, count in zip(self.lengths, new, strict=True)]
        self.unpadded = self.unpadded + tokens if all(count == tokens for count in new) else 0
        self.removed = max(self.removed - min(new, default=0), 0)

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Refuse keys of an attention module that was not patched."""
        raise ValueError("a cache layer of cute_mla was given keys by another attention module; supported: the module that patch() made")

    def get_seq_length(self) -> int:
        """Return the tokens of each request, padding included."""
        return self.seen

    def reset(self) -> None:
        """Drop all keys."""
        super().reset()
        self.index_keys = self.tail = None
        self.seen, self.lengths, self.unpadded, self.removed = 0, [], 0, 0

    def crop(self, tokens_to_remove: int) -> None:
        """Drop the last -tokens_to_remove tokens. ValueError if one of them may be padding, or if the number is positive."""
        count, kept = -tokens_to_remove, RING - self.pool + 1 - self.removed
        if self.tail is not None and count > kept:
            raise ValueError(f"crop({tokens_to_remove}) of a layer with pools of {self.pool} keys; supported: to {-kept}")
        if not 0 <= count <= self.unpadded:
            raise ValueError(
                f"crop({tokens_to_remove}) of {self.unpadded} tokens behind the last padding; supported: 0 to {-self.unpadded}"
            )
        self.append(-count, [-count] * len(self.lengths))

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Take the request beam_idx[b] as request b."""
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each request."""
        self._select(lambda rows: rows.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the requests that `indices`, integers or a mask, select."""
        self._select(lambda rows: rows[indices.to(rows.device)])

    def _select(self, choose: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Apply a selection to the requests. Where requests differ in length, the lengths pass through the device."""
        if self.keys is None:
            return
        shape = (len(self.lengths), self.pages)
        kept = choose(self.keys.unflatten(0, shape))
        if self.index_keys is not None:
            self.index_keys = choose(self.index_keys.unflatten(0, (shape[0], -1))).flatten(0, 1)
        if self.tail is not None:
            self.tail = choose(self.tail)
        if len(set(self.lengths)) > 1:
            self.lengths = choose(torch.tensor(self.lengths)).tolist()
        else:
            self.lengths = self.lengths[:1] * len(kept)
        self.keys = kept.flatten(0, 1)


def latent_layer(cache: Any, index: int) -> LatentCacheLayer:
    """Return the layer of a DynamicCache, after putting a LatentCacheLayer in the place of one without contents.

    Raises ValueError for caches that hold no such layer: static, quantised and offloaded ones, and keys of an unpatched model.
    """
    supported = "supported: a DynamicCache, new or filled by a patched model, without offloading"
    if not isinstance(cache, Cache) or cache.offloading:
        raise ValueError(f"the cache is {type(cache).__name__}{' with offloading' if isinstance(cache, Cache) else ''}; {supported}")
    if cache.layer_class_to_replicate is not None:
        while len(cache.layers) <= index:
            cache.layers.append(cache.layer_class_to_replicate())
    layer = cache.layers[index]
    if type(layer) is DummyLayer or (type(layer) in _REPLACED and not layer.is_initialized):
        layer = cache.layers[index] = LatentCacheLayer()
    if not isinstance(layer, LatentCacheLayer):
        filled = " with keys" if type(layer) in _REPLACED else ""
        raise ValueError(f"layer {index} of the cache is {type(layer).__name__}{filled}; {supported}")
    return layer
