"""The indexer of vLLM's DeepSeek-V3.2 layers: vLLM's metadata and calls, our kernels on the simulated device, against the reference."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm._custom_ops
import vllm.model_executor.layers.sparse_attn_indexer as vllm_indexer
import vllm.models.deepseek_v32.attention as vllm_attention
import vllm.models.deepseek_v32.common.kernels as vllm_kernels
import vllm.v1.attention.backends.mla.indexer as vllm_metadata
from torch import Tensor
from vllm.config import CompilationMode, CUDAGraphMode, set_current_vllm_config
from vllm.config.vllm import DEFAULT_BREAKABLE_CUDAGRAPH_ARCHITECTURES
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.sparse_attn_indexer import SparseAttnIndexer
from vllm.models.hy_v4.nvidia import attention as hy_v4
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.kv_cache_interface import MLAAttentionSpec

from cute_mla.engines.vllm import indexer
from cute_mla.engines.vllm.sparse import CuteMlaSparseImpl
from cute_mla.reference import indexed_keys, indexer_topk
from cute_mla.spec.arch import SM120, Arch
from tests.engines.vllm_adapter.vllm_parts import SCALE, Request, Setting, batch_of, configuration, query_rows, rows_of
from tests.support.launched import launched_ops

HEADS, COLUMNS, PAGE, TOPK = 32, 128, 64, 48
CACHE, ATTENTION = "model.layers.0.self_attn.indexer.k_cache", "model.layers.0.self_attn.attn"
WIDTH = 32  # pages of the longest request
ROOM = 256  # rows of vLLM's buffer, wider than topk as with padded tiles


def _chunk_bounds(starts: Tensor, lengths: Tensor, cu_lengths: Tensor, row_starts: Tensor, owners: Tensor, *rest: Any, **_: Any) -> None:
    """Torch for vLLM's kernel of a prefill chunk, without context parallelism."""
    first, last, begin, end = rest[:4]
    for request in range(len(lengths)):
        owners[int(cu_lengths[request]) : int(cu_lengths[request + 1])] = request
        for token in range(int(starts[request]), int(starts[request + 1])):
            if begin <= token < end:
                seen = int(lengths[request] - starts[request + 1]) + token + 1
                first[token - begin], last[token - begin] = row_starts[request], row_starts[request] + seen


def _uniform_rows(lengths: Tensor, row_lengths: Tensor, table: Tensor, row_table: Tensor, row_counts: Tensor, rows: int, each: int) -> None:
    """Torch for vLLM's kernel that makes a row of every query token, of requests with as many tokens each."""
    row_lengths[:rows] = (lengths[:, None] - each + 1 + torch.arange(each)).flatten()
    row_table[:rows] = table.repeat_interleave(each, 0)
    row_counts[:rows] = 1


def _gather(cache: Tensor, keys: Tensor, scales: Tensor, table: Tensor, starts: Tensor) -> None:
    """Torch for vLLM's op that gathers index keys. Rows behind the last key stay as they were."""
    for request in range(len(table)):
        begin, end = starts[request : request + 2].tolist()
        values, factors = indexed_keys(cache.unsqueeze(2), table[request], end - begin)
        keys[begin:end], scales[begin:end] = values, factors.unsqueeze(1).view(torch.uint8)


def _parts(cache: Tensor) -> tuple[Tensor, Tensor]:
    """Return values [blocks, page, columns] and scales, uint8 [blocks, page, 4], of an index cache."""
    blocks, distance = len(cache), cache.stride(0)
    values = torch.as_strided(cache, (blocks, PAGE, COLUMNS), (distance, COLUMNS, 1)).view(torch.float8_e4m3fn)
    return values, torch.as_strided(cache, (blocks, PAGE, 4), (distance, 4, 1), PAGE * COLUMNS)


@pytest.fixture(autouse=True)
def _hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """VLLM's metadata as on a Hopper with DeepGEMM installed, which must not be called."""
    platform = SimpleNamespace(is_cuda=lambda: True, is_rocm=lambda: False, is_device_capability_family=lambda family: family == 90)
    monkeypatch.setattr(vllm_metadata, "current_platform", platform)
    monkeypatch.setattr(vllm_metadata, "has_deep_gemm", lambda: True)
    monkeypatch.setattr(vllm_metadata, "native_next_n_supported", lambda tokens: tokens in (1, 2, 4))
    monkeypatch.setattr(vllm_metadata, "num_compute_units", lambda index: 6)
    monkeypatch.setattr(vllm_metadata, "PIN_MEMORY", False)
    monkeypatch.setattr(vllm_metadata, "_BUILD_PREFILL_CHUNK_METADATA_KERNEL", _chunk_bounds)
    monkeypatch.setattr(vllm_metadata, "_PREPARE_UNIFORM_DECODE_KERNEL", _uniform_rows)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(vllm._custom_ops, "cp_gather_indexer_k_quant_cache", _gather)
    for module, name in REPLACED:
        monkeypatch.setattr(module, name, getattr(module, name))  # restored behind the test


REPLACED = (
    (vllm_attention, "sparse_attn_indexer"),
    (vllm_kernels, "mqa_logits_use_mx_scales"),
    (vllm_metadata, "get_paged_mqa_logits_metadata"),
)


def parallel(**ranks: int) -> Any:
    sizes = {"decode_context_parallel_size": 1, "prefill_context_parallel_size": 1, **ranks}
    return SimpleNamespace(parallel_config=SimpleNamespace(**sizes))


def v32_indexer() -> Any:
    """Return an indexer of vLLM's class without its weights."""
    found = vllm_attention.DeepseekV32Indexer.__new__(vllm_attention.DeepseekV32Indexer)
    torch.nn.Module.__init__(found)
    found.topk_indices_buffer = torch.zeros(8, TOPK)
    return found


class Model:
    """A layer's index cache, queries, and what vLLM passes around them."""

    def __init__(self, folder: Path, speculative_tokens: int = 0, heads: int = HEADS) -> None:
        self.config = configuration(Setting(heads, topk=TOPK), folder)
        self.buffer = torch.full((ROOM, TOPK + 16), -7, dtype=torch.int32)
        self.heads = heads
        if speculative_tokens:
            speculation = {"num_speculative_tokens": speculative_tokens, "enable_adaptive_verification": False}
            self.config.speculative_config = SimpleNamespace(**speculation, parallel_drafting=False)
        spec = MLAAttentionSpec(block_size=PAGE, num_kv_heads=1, max_tp_shards=1, head_size=COLUMNS + 4, dtype=torch.uint8)
        with set_current_vllm_config(self.config):
            assert indexer.serve_indexer(v32_indexer(), self.config)
            self.builder = vllm_metadata.DeepseekV32IndexerMetadataBuilder(
                spec, [CACHE], self.config, torch.device("cpu"), block_table_width=WIDTH
            )

    def build(self, batch: CommonAttentionMetadata) -> Any:
        """Return vLLM's metadata of a batch, whose block table is as wide as the longest request's."""
        table = batch.block_table_tensor
        batch.block_table_tensor = torch.nn.functional.pad(table, (0, WIDTH - table.shape[1]))
        with set_current_vllm_config(self.config):
            return self.builder.build(0, batch)

    def fill(self, batch: CommonAttentionMetadata) -> None:
        """Make queries, weights and the cache: keys of every request, NaN in values and scales elsewhere. Blocks are twice as far apart."""
        draw = torch.Generator().manual_seed(5)
        blocks = int(batch.block_table_tensor.max()) + 1
        self.cache = torch.full((2 * blocks, PAGE, COLUMNS + 4), 0xFF, dtype=torch.uint8)[::2]
        values, scales = _parts(self.cache)
        for request in range(batch.num_reqs):
            pages, rows = rows_of(batch, request, PAGE)
            values[pages, rows] = torch.randn(len(rows), COLUMNS, generator=draw).to(torch.float8_e4m3fn)
            factors = torch.exp2(torch.randint(-6, -2, (len(rows), 1), generator=draw).float())
            scales[pages, rows] = factors.view(torch.uint8)
        self.q = torch.randn(batch.num_actual_tokens, self.heads, COLUMNS, generator=draw).to(torch.float8_e4m3fn)
        self.weights = torch.randn(batch.num_actual_tokens, self.heads, generator=draw)

    def choose(self, metadata: Any, mode: CUDAGraphMode = CUDAGraphMode.NONE, attention: Any = None, clear: bool = True) -> Tensor:
        """Call the layer's function as DeepseekV32Attention does."""
        hidden = torch.empty(len(self.q), 1)
        arguments = (hidden, CACHE, self.cache, self.q, None, None, self.weights, 128, "ue8m0", TOPK, COLUMNS, 2048, 4096, self.buffer)
        known = None if metadata is None else {CACHE: metadata, ATTENTION: attention}
        with set_forward_context(known, self.config, cudagraph_runtime_mode=mode):
            chosen: Tensor = vllm_attention.sparse_attn_indexer(
                *arguments,
                skip_k_cache_insert=True,
                use_pcp=False,
                pcp_shard_decode_requests=False,
                dense_mha_metadata_layer_name=ATTENTION,
                skip_topk_buffer_clear=not clear,
            )
        return chosen

    def expected(self, batch: CommonAttentionMetadata) -> Tensor:
        """Positions [tokens, topk] of every request on its own."""
        found = torch.full((len(self.q), TOPK), -1, dtype=torch.int32)
        for request in range(batch.num_reqs):
            own = query_rows(batch, request)
            if own.start == own.stop:
                continue
            table, length = batch.block_table_tensor[request : request + 1], batch.seq_lens[request : request + 1]
            found[own] = indexer_topk(self.q[None, own], self.weights[own], self.cache.unsqueeze(2), length, table, TOPK)
        return found


BATCHES: dict[str, tuple[int, list[Request], list[str]]] = {
    "decode": (0, [Request(1, 300), Request(1, 1), Request(1, 64), Request(1, 65)], ["mqa_logits", "topk_indices"]),
    "verification": (1, [Request(2, 300), Request(2, 2), Request(2, 65)], ["mqa_logits", "topk_indices"]),
    "shorter drafts": (1, [Request(2, 300), Request(1, 63), Request(2, 65)], 2 * ["mqa_logits", "topk_indices"]),  # vLLM prefills them
    "rows": (2, [Request(3, 300), Request(3, 63)], ["mqa_logits", "topk_indices"]),
    "different rows": (2, [Request(3, 300), Request(1, 63), Request(2, 65)], ["mqa_logits", "topk_indices"]),
    "prefill": (0, [Request(70, 70), Request(3, 150)], ["mqa_logits", "topk_indices"]),
    "mixed": (0, [Request(1, 200), Request(1, 5), Request(30, 94)], 2 * ["mqa_logits", "topk_indices"]),
}


@pytest.mark.parametrize(("drafts", "requests", "launched"), BATCHES.values(), ids=BATCHES)
def test_keys_are_chosen_from_vllms_metadata(arch: Arch, drafts: int, requests: list[Request], launched: list[str], tmp_path: Path) -> None:
    model, batch = Model(tmp_path, drafts), batch_of(requests, PAGE)
    model.fill(batch)
    metadata = model.build(batch)
    with launched_ops(arch) as ops:
        chosen = model.choose(metadata)
    assert ops == launched
    tokens = batch.num_actual_tokens
    assert torch.equal(chosen[:tokens, :TOPK], model.expected(batch))
    assert (chosen[:tokens, TOPK:] == -1).all()
    assert (chosen[tokens:] == -7).all()


def test_keys_are_chosen_on_rtx_boards(tmp_path: Path) -> None:
    test_keys_are_chosen_from_vllms_metadata(SM120, *BATCHES["mixed"], tmp_path)


@pytest.mark.parametrize("heads", [1, 64])
def test_heads(arch: Arch, heads: int, tmp_path: Path) -> None:
    model, batch = Model(tmp_path, heads=heads), batch_of([Request(1, 130), Request(9, 70)], PAGE)
    model.fill(batch)
    with launched_ops(arch):
        chosen = model.choose(model.build(batch), clear=False)
    assert torch.equal(chosen[:10, :TOPK], model.expected(batch))
    assert (chosen[:, TOPK:] == -7).all()  # vLLM has cleared the buffer in another kernel


def test_prefill_in_chunks_that_gather_once(arch: Arch, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    model, batch = Model(tmp_path), batch_of([Request(40, 90), Request(5, 70)], PAGE)
    split = [(slice(0, 1), slice(0, 25)), (slice(0, 1), slice(25, 40)), (slice(1, 2), slice(0, 5))]
    monkeypatch.setattr(model.builder, "_split_indexer_prefill_chunks", lambda *_, **__: split)
    model.fill(batch)
    metadata = model.build(batch)
    assert [chunk.skip_kv_gather for chunk in metadata.prefill.chunks] == [False, True, False]
    with launched_ops(arch) as ops:
        chosen = model.choose(metadata)
    assert ops == 3 * ["mqa_logits", "topk_indices"]
    assert torch.equal(chosen[:45, :TOPK], model.expected(batch))


def test_ranks_of_tensor_parallelism_share_the_rows_of_prefill(arch: Arch, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    model, batch = Model(tmp_path), batch_of([Request(1, 60), Request(20, 90)], PAGE)
    model.fill(batch)
    metadata = model.build(batch)
    metadata.prefill.row_shard_sizes = [12, 8]
    parts: list[Tensor] = []

    def all_gatherv(local: Tensor, dim: int, sizes: list[int]) -> Tensor:
        """Take a rank's part, all that it has chosen before the token of decode."""
        assert int((model.buffer[: sum(sizes) + 1, 0] >= 0).sum()) == len(local)
        parts.append(local.clone())
        return torch.zeros(sum(sizes), TOPK, dtype=torch.int32)

    monkeypatch.setattr(vllm_indexer, "get_tp_group", lambda: SimpleNamespace(all_gatherv=all_gatherv))
    for rank in range(2):
        monkeypatch.setattr(vllm_indexer, "get_tensor_model_parallel_rank", lambda rank=rank: rank)
        with launched_ops(arch):
            model.choose(metadata)
    assert torch.equal(torch.cat(parts), model.expected(batch)[1:])


@pytest.mark.parametrize("drafts", [0, 1, 2])
def test_tokens_and_requests_that_pad_a_graph(arch: Arch, drafts: int, tmp_path: Path) -> None:
    each = 1 + drafts
    requests = [Request(each, 100), Request(each, 64), Request(0, 0), Request(0, 0)]
    model, batch = Model(tmp_path, drafts), batch_of(requests, PAGE, padded_tokens=4 * each)
    model.fill(batch)
    metadata = model.build(batch)
    assert metadata.decode.requires_padding == (drafts < 2)  # vLLM makes rows of more tokens on Hopper
    with launched_ops(arch):
        chosen = model.choose(metadata, CUDAGraphMode.FULL)
    assert torch.equal(chosen[: 2 * each, :TOPK], model.expected(batch)[: 2 * each])
    assert (chosen[2 * each : 4 * each, :TOPK] == -1).all()


def test_a_batch_that_attends_to_all_keys_is_not_scored(arch: Arch, tmp_path: Path) -> None:
    model, batch = Model(tmp_path), batch_of([Request(40, 40)], PAGE)
    model.fill(batch)
    metadata, dense = model.build(batch), SimpleNamespace(prefill=SimpleNamespace(use_dense_mha=True), num_decode_tokens=0)
    with launched_ops(arch) as ops:
        assert (model.choose(metadata, attention=dense) == -7).all()
        assert ops == []
        model.choose(metadata, CUDAGraphMode.FULL, dense)
    assert ops != []


def test_a_run_without_metadata_reserves_vllms_workspace(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    model = Model(tmp_path)
    model.fill(batch_of([Request(1, 1)], PAGE))
    monkeypatch.setattr(vllm_indexer, "sparse_attn_indexer", lambda *given, **_: given)
    assert model.choose(None)[3] is model.q


def _write(k: Tensor, cache: Tensor, slots: Tensor, columns: int, fmt: str) -> None:
    """Torch for vLLM's op that quantises index keys, a power of two as the scale of each, and writes them to their slots."""
    assert (columns, fmt, len(k)) == (COLUMNS, "ue8m0", len(slots))
    factors = torch.exp2((k.float().abs().amax(1, keepdim=True).clamp(min=1e-4) / 448).log2().ceil())
    values, scales = _parts(cache)
    for row, slot in enumerate(slots.tolist()):
        if slot >= 0:
            values[slot // PAGE, slot % PAGE] = (k[row].float() / factors[row]).to(torch.float8_e4m3fn)
            scales[slot // PAGE, slot % PAGE] = factors[row].view(torch.uint8)


class OwnOp:
    """A layer's indexer with an op of its own, over the cache of a model, as Hy4's."""

    def __init__(self, model: Model, **options: Any) -> None:
        model.config.kernel_config.enable_jit_warmup = False
        model.config.compilation_config.mode = CompilationMode.NONE  # vLLM's choice for Hy4, whose CUDA graphs break at the indexer
        cache = SimpleNamespace(prefix=CACHE, kv_cache=model.cache)
        with set_current_vllm_config(model.config):
            self.indexer_op = SparseAttnIndexer(cache, 128, "ue8m0", TOPK, COLUMNS, 2048, 4096, model.buffer, **options)


@pytest.mark.parametrize("padded", [False, True])
def test_layers_with_an_op_of_their_own(arch: Arch, padded: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Hy4: new keys are quantised and written by vLLM, then scored and chosen here. Until the layer is served, vLLM's op does all."""
    assert "HYV4ForCausalLM" in DEFAULT_BREAKABLE_CUDAGRAPH_ARCHITECTURES
    assert "SparseAttnIndexer" in hy_v4.Indexer.__init__.__code__.co_names
    monkeypatch.setattr(vllm._custom_ops, "indexer_k_quant_and_cache", _write)
    requests = [Request(1, 200), Request(1, 5), *([] if padded else [Request(30, 94)])]
    model, batch = Model(tmp_path, heads=16), batch_of(requests, PAGE)
    model.fill(batch)
    tokens, k = batch.num_actual_tokens, torch.randn(40 if padded else 32, COLUMNS, generator=torch.Generator().manual_seed(9)).bfloat16()
    owner, (values, scales) = OwnOp(model), _parts(model.cache)
    written = model.cache.clone()
    _write(k[:tokens], written, batch.slot_mapping, 128, "ue8m0")
    for part in (values.view(torch.uint8), scales):
        part[batch.slot_mapping // PAGE, batch.slot_mapping % PAGE] = 0xFF
    monkeypatch.setattr(SparseAttnIndexer, "forward_cuda", lambda *_: "vLLM's")
    given = (torch.empty(len(k), 1), model.q, k, model.weights)
    assert owner.indexer_op.forward_cuda(*given) == "vLLM's"
    assert indexer.serve_indexer(owner, model.config)
    assert vllm_metadata.get_paged_mqa_logits_metadata is indexer._planned
    with launched_ops(arch) as ops, set_forward_context({CACHE: model.build(batch)}, model.config):
        chosen = owner.indexer_op.forward_cuda(*given)
    assert ops == (1 if padded else 2) * ["mqa_logits", "topk_indices"]
    assert torch.equal(model.cache, written)
    assert torch.equal(chosen[:tokens, :TOPK], model.expected(batch))
    assert (chosen[tokens : len(k)] == -1).all()


def test_ops_that_stay_vllms(tmp_path: Path) -> None:
    """Ops of models that are compiled, of ranks that share the keys, and over keys of other formats."""
    model = Model(tmp_path)
    model.fill(batch_of([Request(1, 1)], PAGE))
    owner = OwnOp(model)
    for options in ({"skip_k_cache_insert": True}, {"use_fp4_cache": True}, {"compress_ratio": 4}, {"candidate_blocks": torch.zeros(1)}):
        assert not indexer.serve_indexer(OwnOp(model, **options), model.config)
    for ranks in ({"decode_context_parallel_size": 2}, {"prefill_context_parallel_size": 2}):
        assert not indexer.serve_indexer(owner, parallel(**ranks))
    model.config.compilation_config.mode = CompilationMode.VLLM_COMPILE
    assert not indexer.serve_indexer(owner, model.config)
    assert owner.indexer_op.choose is None


def test_the_arguments_are_vllms() -> None:
    given = inspect.signature(vllm_indexer.sparse_attn_indexer).parameters
    assert list(given) == list(indexer.IndexerCall._fields)
    defaults = {name: parameter.default for name, parameter in given.items() if parameter.default is not inspect.Parameter.empty}
    assert defaults == indexer.IndexerCall._field_defaults


def body(function: Callable[..., Any]) -> Callable[..., Any]:
    return inspect.unwrap(function)


def test_vllms_layer_calls_it(tmp_path: Path) -> None:
    """The three names are looked up in their modules when they are called, so that replacing them there is enough."""
    Model(tmp_path)
    layer = body(vllm_attention.DeepseekV32Attention._sparse_indexer_and_attn)
    assert "sparse_attn_indexer" in layer.__code__.co_names
    assert layer.__globals__["sparse_attn_indexer"] is indexer.sparse_attn_indexer
    writer = body(vllm_attention.fused_norm_rope)
    names = {name for _, function in inspect.getmembers(vllm_kernels, inspect.isfunction) for name in function.__code__.co_names}
    assert "mqa_logits_use_mx_scales" in names
    assert writer.__globals__["mqa_logits_use_mx_scales"]() is False
    builder = vllm_metadata.DeepseekV32IndexerMetadataBuilder
    for method in (builder.build, builder.update_draft_decode_metadata):
        assert "get_paged_mqa_logits_metadata" in method.__code__.co_names


def test_a_layer_of_the_backend_installs_it_and_others_do_not(tmp_path: Path) -> None:
    before = [getattr(module, name) for module, name in REPLACED]

    def layer(given: Any) -> None:
        config = configuration(Setting(16, topk=TOPK), tmp_path)
        with set_current_vllm_config(config):
            CuteMlaSparseImpl(
                16, 576, SCALE, 1, alibi_slopes=None, sliding_window=None, kv_cache_dtype="auto", logits_soft_cap=None,
                attn_type="decoder", kv_sharing_target_layer_name=None, q_lora_rank=64, kv_lora_rank=512, qk_nope_head_dim=128,
                qk_rope_head_dim=64, qk_head_dim=192, v_head_dim=128, kv_b_proj=None, indexer=given,
                topk_indices_buffer=torch.zeros(8, TOPK),
            )  # fmt: skip

    layer(None)
    layer(SimpleNamespace(topk_indices_buffer=torch.zeros(8, TOPK)))  # of GLM-5.3-Flash: keys of its own
    for ranks in ({"decode_context_parallel_size": 2}, {"prefill_context_parallel_size": 2}):
        assert not indexer.serve_indexer(v32_indexer(), parallel(**ranks))
    assert before == [getattr(module, name) for module, name in REPLACED]
    layer(v32_indexer())
    assert all(new is not old for new, old in zip([getattr(module, name) for module, name in REPLACED], before, strict=True))


def test_batchmates_do_not_change_the_choice(arch: Arch, tmp_path: Path) -> None:
    model, together = Model(tmp_path), batch_of([Request(1, 200), Request(1, 300), Request(30, 94)], PAGE)
    model.fill(together)
    with launched_ops(arch):
        chosen = model.choose(model.build(together)).clone()
        alone = batch_of([Request(1, 200)], PAGE)
        alone.block_table_tensor = together.block_table_tensor[:1].clone()
        model.q, model.weights = model.q[:1], model.weights[:1]
        assert torch.equal(model.choose(model.build(alone))[0], chosen[0])


def test_unseen_keys_may_be_anything(arch: Arch, tmp_path: Path) -> None:
    """NaN fills the cache around the keys, and the workspace that keys are gathered to."""
    model, batch = Model(tmp_path), batch_of([Request(20, 61), Request(20, 20)], PAGE)
    model.fill(batch)
    metadata = model.build(batch)
    for chunk in metadata.prefill.chunks:
        chunk.total_seq_lens += 40  # vLLM knows an upper bound
    spare = indexer.current_workspace_manager().get_simultaneous(((4096, COLUMNS + 4 + 64), torch.uint8))
    spare[0].fill_(0xFF)
    with launched_ops(arch):
        chosen = model.choose(metadata)
    assert torch.equal(chosen[:40, :TOPK], model.expected(batch))
    assert not math.isnan(float(chosen.sum()))
