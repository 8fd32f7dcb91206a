"""CUDA graphs of batches with prefill: what vLLM captures and replays them with, and the attention of such a batch."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from vllm.config import CUDAGraphMode, set_current_vllm_config
from vllm.v1.attention.backend import AttentionCGSupport, AttentionMetadataBuilder, CommonAttentionMetadata
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor, _is_compatible

from cute_mla.engines.vllm.dense import CuteMlaMetadataBuilder
from cute_mla.engines.vllm.sparse import CuteMlaSparseMetadataBuilder
from cute_mla.reference import attention, visible_keys
from cute_mla.spec.arch import Arch
from tests.engines.vllm_adapter.vllm_parts import LATENT, ROPE, SCALE, Request, Setting, agree, batch_of, query_rows, rows_of, serve
from tests.support.launched import launched_ops

HEADS, TOKENS, REQUESTS, PAGES = 8, 40, 4, 16


def configured(mode: CUDAGraphMode, **parallel: int) -> Any:
    sizes = {"decode_context_parallel_size": 1, "prefill_context_parallel_size": 1, **parallel}
    return SimpleNamespace(compilation_config=SimpleNamespace(cudagraph_mode=mode), parallel_config=SimpleNamespace(**sizes))


@pytest.mark.parametrize("mode", list(CUDAGraphMode), ids=lambda mode: mode.name)
def test_any_batch_is_declared_where_vllm_would_capture_prefill(mode: CUDAGraphMode) -> None:
    support = CuteMlaMetadataBuilder.get_cudagraph_support
    assert (support(configured(mode), None) is AttentionCGSupport.ALWAYS) == (mode is CUDAGraphMode.FULL)
    for ranks in ({"decode_context_parallel_size": 2}, {"prefill_context_parallel_size": 2}):
        assert support(configured(mode, **ranks), None) is AttentionCGSupport.UNIFORM_BATCH
    assert CuteMlaSparseMetadataBuilder.get_cudagraph_support(configured(mode), None) is AttentionCGSupport.UNIFORM_BATCH


@pytest.mark.parametrize("support", [AttentionCGSupport.ALWAYS, AttentionCGSupport.UNIFORM_BATCH], ids=lambda support: support.name)
def test_vllm_replays_a_graph_of_any_batch_for_prefill(support: AttentionCGSupport, tmp_path: Path) -> None:
    """So a builder that reports ALWAYS must have no prefill, whose launches depend on lengths of the host."""
    compilation = serve(Setting(HEADS, graphs=CUDAGraphMode.FULL), tmp_path).config.compilation_config
    kept = compilation.resolve_cudagraph_mode_and_sizes(support, "CuteMla", use_v2_model_runner=True)
    assert (kept.mixed_mode() is CUDAGraphMode.FULL) == (support is AttentionCGSupport.ALWAYS)
    graph = BatchExecutionDescriptor(CUDAGraphMode.FULL, TOKENS, REQUESTS)
    assert _is_compatible(graph, 2, 30, None, 0, None, 1)  # None of max_query_len: a batch with prefill


def test_there_is_no_hook_for_a_shared_prefix() -> None:
    """A vLLM that asks backends about cascade attention again makes this fail; cute_mla.shared_prefix could then serve it."""
    assert not hasattr(AttentionMetadataBuilder, "use_cascade_attention")
    assert "always 0" in str(AttentionMetadataBuilder.build.__doc__)


class Persistent:
    """Tensors that vLLM's runner keeps at fixed addresses for its graphs: a batch padded to REQUESTS requests and TOKENS tokens."""

    def __init__(self) -> None:
        self.table = torch.zeros(REQUESTS, PAGES, dtype=torch.int32)
        self.lengths, self.starts = (torch.zeros(n, dtype=torch.int32) for n in (REQUESTS, REQUESTS + 1))

    def load(self, requests: list[Request], longest: int | None = None) -> CommonAttentionMetadata:
        """Write a batch to the buffers and describe it as vLLM does. longest: of the capture, all tokens."""
        batch = batch_of([*requests, *[Request(0, 0)] * (REQUESTS - len(requests))], 64, padded_tokens=TOKENS)
        self.table.zero_()[:, : batch.block_table_tensor.shape[1]] = batch.block_table_tensor
        self.lengths.copy_(batch.seq_lens)
        self.starts.copy_(batch.query_start_loc)
        batch.block_table_tensor, batch.seq_lens, batch.query_start_loc = self.table, self.lengths, self.starts
        batch.max_query_len = longest or batch.max_query_len
        return batch


def keys_of(requests: list[Request], batch: CommonAttentionMetadata, cache: Tensor) -> None:
    generator = torch.Generator().manual_seed(3)
    for request in range(len(requests)):
        blocks, rows = rows_of(batch, request, 64)
        cache[blocks, rows] = torch.randn(len(rows), LATENT + ROPE, generator=generator).to(cache.dtype)


def test_a_graph_of_any_batch(arch: Arch, tmp_path: Path) -> None:
    """Captured with vLLM's dummy batch and replayed with decode, verification and prefill, new and continued."""
    served, buffers = serve(Setting(HEADS, graphs=CUDAGraphMode.FULL), tmp_path), Persistent()
    capture = buffers.load([Request(10, 10)] * REQUESTS, longest=TOKENS)
    requests = [Request(1, 200), Request(3, 70), Request(30, 94)]
    q = torch.randn(TOKENS, HEADS, LATENT + ROPE, generator=torch.Generator().manual_seed(4)).bfloat16()
    q[34:] = torch.nan  # tokens that pad the batch
    with launched_ops(arch) as ops, set_current_vllm_config(served.config):
        captured = served.builder.build_for_cudagraph_capture(capture)
        batch = buffers.load(requests)
        replayed = served.build(batch)
        assert (replayed.num_decode_tokens, replayed.num_prefills) == (TOKENS, 0)
        assert replayed.decode.max_query_len == captured.decode.max_query_len == TOKENS
        places = [[part.data_ptr() for part in metadata.decode.plan] for metadata in (captured, replayed)]
        assert places[0] == places[1]
        cache = torch.full((int(batch.block_table_tensor.max()) + 1, 64, LATENT + ROPE), torch.nan, dtype=torch.bfloat16)
        keys_of(requests, batch, cache)
        del ops[:]
        out, _ = served.mqa(q, cache, captured)  # a graph has the arguments of its capture
    assert ops == ["dense_decode", "combine"]
    for request in range(len(requests)):
        own = query_rows(batch, request)
        keys = cache[tuple(rows_of(batch, request, 64))].float()[None]
        mine = q[own].float().transpose(0, 1)
        visible = visible_keys(mine.shape[1], keys.shape[1], True, q.device)
        agree(out[own], attention(mine, keys, keys[..., :LATENT], SCALE, visible)[0].transpose(0, 1))
    assert (out[34:] == 0).all()


def test_eager_batches_have_no_prefill_either(arch: Arch, tmp_path: Path) -> None:
    served = serve(Setting(HEADS, graphs=CUDAGraphMode.FULL), tmp_path)
    with launched_ops(arch) as ops:
        metadata = served.build(batch_of([Request(1, 5), Request(200, 250)], 64))
    assert (metadata.num_decodes, metadata.num_prefills, metadata.decode.max_query_len) == (2, 0, 201)
    assert ops == ["split_plan"]
