"""vLLM without a GPU. What it does on CUDA or in Triton alone is replaced by torch of the same meaning; the rest is the package itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import vllm._custom_ops
from torch import Tensor
from vllm.model_executor.layers.attention import mla_attention, sparse_mla_attention
from vllm.plugins import load_general_plugins
from vllm.utils import torch_utils
from vllm.v1.attention.backends.mla.index_group import SparseMLAIndexGroup
from vllm.v1.attention.ops import metadata
from vllm.v1.attention.ops.merge_attn_states import _merge_attn_states_torch
from vllm.v1.worker.workspace import init_workspace_manager, reset_workspace_manager

from tests.engines.vllm_adapter.vllm_parts import gather_keys

_ORDER = torch.Generator().manual_seed(7)  # never the same twice, as on a GPU


@pytest.fixture(scope="session", autouse=True)
def _plugins() -> None:
    load_general_plugins()


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    from cute_mla.engines.vllm import sparse  # only when vLLM has loaded its plugins, which is what others test

    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: None)
    for module in (torch_utils, mla_attention, sparse_mla_attention):
        monkeypatch.setattr(module, "PIN_MEMORY", False)
    monkeypatch.setattr(metadata, "compute_token_to_req_indices", _token_to_request)
    monkeypatch.setattr(mla_attention, "merge_attn_states", _merge_attn_states_torch)  # vLLM's own, of its CPU platform
    monkeypatch.setattr(vllm._custom_ops, "gather_and_maybe_dequant_cache", gather_keys)
    monkeypatch.setattr(sparse, "triton_filter_and_convert_dcp_index", _slots)
    # Not in vLLM 0.32, whose other tests may then run.
    monkeypatch.setattr(sparse_mla_attention, "triton_filter_and_convert_dcp_index", _slots, raising=False)
    monkeypatch.setattr(sparse_mla_attention, "triton_convert_req_index_to_global_index", _slots)
    monkeypatch.setattr(sparse_mla_attention, "get_tensor_model_parallel_world_size", lambda: 1)
    monkeypatch.setattr(SparseMLAIndexGroup, "convert_logical_to_physical_topk", _slots_of_group)
    init_workspace_manager(torch.device("cpu"))
    yield
    reset_workspace_manager()


def _token_to_request(query_start_loc: Tensor, out: Tensor, num_mapped_tokens: int, num_tokens: int) -> Tensor:
    tokens = torch.arange(num_mapped_tokens)
    out[:num_tokens] = 0
    out[:num_mapped_tokens] = torch.searchsorted(query_start_loc[1:].long(), tokens, right=True).to(torch.int32)
    return out[:num_tokens]


def _slots(
    req_id: Tensor,
    block_table: Tensor,
    token_indices: Tensor,
    *,
    BLOCK_SIZE: int,
    BLOCK_STRIDE_ROWS: int | None = None,
    return_valid_counts: bool = False,
    compact_valid_to_front: bool = True,
    **options: Any,
) -> Any:
    """Return slots of this rank's keys; the others -1. They move to the front in any order."""
    ids, (dcp_size, dcp_rank) = token_indices.long(), (options.get("dcp_size", 1), options.get("dcp_rank", 0))
    interleave, known = options.get("cp_kv_cache_interleave_size", 1), ids.clamp(min=0)
    local = known // (dcp_size * interleave) * interleave + known % interleave
    mine = (ids >= 0) & (known // interleave % dcp_size == dcp_rank)
    blocks = block_table[req_id.long()].long().gather(1, torch.where(mine, local, 0) // BLOCK_SIZE)
    slots = torch.where(mine, blocks * (BLOCK_STRIDE_ROWS or BLOCK_SIZE) + local % BLOCK_SIZE, -1)
    counts = mine.sum(1).to(torch.int32)
    if compact_valid_to_front:
        order = torch.where(mine, torch.rand(mine.shape, generator=_ORDER), 2.0).argsort(1)
        slots = slots.gather(1, order)
    slots = slots.to(torch.int32)
    return (slots, counts) if return_valid_counts else slots


def _slots_of_group(group: Any, layer: int, topk: Tensor, batch: Any, *, block_stride_rows: int, return_valid_counts: bool) -> Any:
    return _slots(
        batch.req_id_per_token[: len(topk)],
        batch.block_table,
        topk,
        BLOCK_SIZE=batch.block_size,
        BLOCK_STRIDE_ROWS=block_stride_rows,
        return_valid_counts=return_valid_counts,
        compact_valid_to_front=return_valid_counts,
    )
