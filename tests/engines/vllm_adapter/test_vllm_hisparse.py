"""HiSparse, vLLM's caches on the host: keys that are not on the device are copied to a hot buffer, or staged for prefill."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm.envs as envs
from torch import Tensor
from vllm.model_executor.layers.attention import sparse_mla_attention
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.mla.index_group import HiSparseMLAIndexGroup

from cute_mla.engines.vllm import sparse
from cute_mla.spec.arch import Arch
from tests.engines.vllm_adapter.sparse_parts import choose, expected, filled_cache, queries, served_by
from tests.engines.vllm_adapter.vllm_parts import Request, agree, batch_of, rows_of
from tests.support.launched import launched_ops

REQUESTS = [Request(1, 300), Request(1, 5), Request(3, 90)]


def poisoned(like: Tensor) -> Tensor:
    """Return a cache of this shape without keys."""
    return torch.full(like.shape, 0xFF if like.dtype == torch.uint8 else torch.nan, dtype=like.dtype)


class Group(HiSparseMLAIndexGroup):
    """A layer's group of indices over a hot buffer with the keys of decode requests in any order, and staged keys of prefill.

    The buffer has blocks of 128 rows. resident: whether it has the keys of prefill, too.
    """

    def __init__(self, batch: CommonAttentionMetadata, cache: Tensor, resident: bool) -> None:
        count, self.resident = sum(batch.seq_lens.tolist()), resident
        self.hot = poisoned(cache.new_empty(1, 1, cache.shape[2]).expand(-(-count // 128), 128, -1))
        spare = self.hot.shape[0] * 128 - count
        places = (spare + torch.randperm(count, generator=torch.Generator().manual_seed(7))).split(batch.seq_lens.tolist())
        self.places, self.batch, self.source = places, batch, cache
        for request in range(batch.num_reqs if resident else 2):
            self.hot.flatten(0, 1)[places[request]] = cache[tuple(rows_of(batch, request, 64))]

    def physical_kv_cache(self, layer_index: int) -> Tensor:
        """Return the hot buffer."""
        return self.hot

    def cache(self, layer_index: int) -> Any:
        """Return what the layer asks of its cache."""
        return SimpleNamespace(all_context_pages_resident=self.resident)

    def convert_logical_to_physical_topk(self, layer_index: int, topk: Tensor, metadata: Any, **options: Any) -> tuple[Tensor, Tensor]:
        """Return rows of the hot buffer, the valid ones first, and their numbers."""
        assert options == {"block_stride_rows": None, "return_valid_counts": True}
        rows = torch.full_like(topk, -1)
        for token, chosen in enumerate(topk):
            own = self.places[int(metadata.req_id_per_token[token])][chosen[chosen >= 0].long()]
            rows[token, : len(own)] = own.to(torch.int32)
        return rows, (rows >= 0).sum(1).to(torch.int32)

    def stage_prefill_rows(self, layer_index: int, cache: Tensor, metadata: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Return the pages of the prefill request, its block table and the requests of its tokens."""
        pages = self.batch.block_table_tensor[2, :2].long()
        return self.source[pages].contiguous(), torch.tensor([[0, 1]], dtype=torch.int32), torch.zeros(3, dtype=torch.int32)


@pytest.mark.parametrize("cache", ["auto", "fp8_ds_mla"])
@pytest.mark.parametrize("resident", [False, True], ids=["staged", "resident"])
def test_decode_and_prefill(arch: Arch, cache: str, resident: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A batch of both: decode reads the hot buffer, prefill staged keys or the hot buffer, too, and nothing the host's cache."""
    monkeypatch.setattr(sparse_mla_attention, "build_hisparse_prefill_staging_plan", lambda table, *_: SimpleNamespace(block_table=table))
    served, batch = served_by(16, cache, tmp_path), batch_of(REQUESTS, 64)
    storage, worth = filled_cache(batch, served.setting)
    chosen = choose(served, batch)
    served.layer.impl.index_group = Group(batch, storage, resident)
    served.config.attention_config.hisparse_config = object()
    served.builder._init_reorder_batch_threshold(8)
    assert served.builder.reorder_batch_threshold == 1
    q = queries(5, 16)
    with launched_ops(arch) as ops:
        metadata = served.build(batch)
        assert (metadata.num_decode_tokens, metadata.num_actual_tokens) == (2, 5)
        out, lse = served.mqa(q, poisoned(storage), metadata)
    packed = cache == "fp8_ds_mla"
    prefill = ["sparse_decode", "combine"] if packed else ["sparse_prefill"]
    assert ops == [*3 * ["split_plan"], *(() if resident else ("sparse_decode", "combine")), *prefill]
    assert lse is None
    agree(out, expected(batch, torch.cat(q, dim=-1), worth, chosen, (1, 0))[0], 8e-3)


def test_batch_invariance_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(envs, "VLLM_BATCH_INVARIANT", True, raising=False)
    monkeypatch.setattr(sparse, "HiSparseMLAIndexGroup", object)
    with pytest.raises(NotImplementedError, match="hisparse_config is given with VLLM_BATCH_INVARIANT; supported: one of the two"):
        served_by(16, "auto", tmp_path)
