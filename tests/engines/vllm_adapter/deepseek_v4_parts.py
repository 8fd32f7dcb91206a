"""Layers of DeepSeek-V4 and V4.1 as vLLM calls them, their two caches, torch for vLLM's Triton kernels, and attention in fp32."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import vllm.v1.attention.backends.mla.sparse_swa as sparse_swa
from torch import Tensor
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.forward_context import set_forward_context
from vllm.model_executor.models.registry import ModelRegistry
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from cute_mla.cache import dequantise_cache, empty_cache, quantise_cache
from cute_mla.reference.latent import attend_to_all
from tests.engines.vllm_adapter.vllm_parts import Request, Setting, batch_of, configuration, query_rows, rows_of

COLUMNS, WINDOW, TOPK, SCALE = 512, 40, 24, 512**-0.5
_SETTING = Setting(16)
LAYER, SWA = "model.layers.0.attn", "model.layers.0.attn.swa_cache"
ARCHITECTURES = {"deepseek_v4": "DeepseekV4ForCausalLM", "deepseek_v41": "DeepseekV41ForCausalLM"}


@dataclass(frozen=True)
class Kind:
    """A kind of layer. ratio: tokens of a compressed key; block: tokens of a block of compressed keys. cache: vLLM's cache dtype."""

    model: str
    ratio: int
    block: int
    formats: tuple[str, str]
    cache: str = "auto"

    @property
    def compressed(self) -> bool:
        """Return whether the layer has a second cache. V4 counts 1 for none, V4.1 0."""
        return self.ratio > (1 if self.model == "deepseek_v4" else 0)


def kinds_of(arch: str) -> dict[str, Kind]:
    """Return the kinds of layers on an architecture, with the records that vLLM writes there."""
    new, block = arch == "sm100", 64 if arch == "sm90" else 128
    v4 = "fp8_584", "fp8_584"
    v41 = ("v41", "v41") if new else v4
    kinds = {f"V4, {ratio}": Kind("deepseek_v4", ratio, 256, v4) for ratio in (1, 4, 128)}
    kinds |= {f"V4.1, {ratio}": Kind("deepseek_v41", ratio, block, v41) for ratio in (0, 1, 2)}
    return kinds | ({"V4.1, fp4": Kind("deepseek_v41", 2, block, ("v41", "v41_fp4"), "nvfp4_ds_mla")} if new else {})


def pick(model: str, folder: Path, backend: str | None = "CUTE_MLA_SPARSE", setting: Setting = _SETTING) -> tuple[Any, VllmConfig]:
    """Load a model's class, and return the class of layer that its module picks, and the configuration."""
    config = configuration(setting, folder)
    config.attention_config.backend = None if backend is None else AttentionBackendEnum[backend]
    ModelRegistry.models[ARCHITECTURES[model]].load_model_cls()
    return import_module(f"vllm.models.{model}.nvidia.model")._select_dsv4_attn_cls(config), config


def layer_of(kind: Kind, heads: int, buffer: Tensor, folder: Path) -> tuple[Any, VllmConfig]:
    """Return a layer as vLLM makes it, and its configuration."""
    layer_class, config = pick(kind.model, folder, setting=Setting(heads, cache=kind.cache, block_size=kind.block))
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}, "rope_theta": 1e4, "compress_rope_theta": 1.6e5}
    sizes = {"head_dim": COLUMNS, "qk_rope_head_dim": 64, "o_groups": 1, "o_lora_rank": 64, "sliding_window": WINDOW}
    indexer = {"index_topk": TOPK, "index_n_heads": 32, "index_head_dim": 128}
    ratios = {"layer_types": ["it"], "compress_rates": {"it": kind.ratio}, "compress_ratios": [kind.ratio]}
    sources = {"kv_source_layer_ids": [0], "index_source_layer_ids": [0]} if kind.compressed else {}
    for name, value in {**rope, **sizes, **indexer, **ratios, **sources}.items():
        setattr(config.model_config.hf_config, name, value)
    config.kernel_config.enable_jit_warmup = False
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with set_current_vllm_config(config):
            return layer_class(config, prefix=LAYER, topk_indices_buffer=buffer), config
    finally:
        torch.set_default_dtype(before)


def cache_of(batch: CommonAttentionMetadata, kind: str, spec: Any, seed: int) -> tuple[Tensor, list[Tensor]]:
    """Return (a cache [blocks, 1, block, bytes] as vLLM binds it, what each request's keys are worth); NaN where there are no keys.

    spec: vLLM's, which pads pages. They are twice as far apart, as those of other layers lie between.
    """
    block = spec.num_states
    blocks = int(batch.block_table_tensor.max()) + 1
    keys = torch.full((blocks, block, 1, COLUMNS), float("nan"), dtype=torch.bfloat16)
    for request in range(batch.num_reqs):
        pages, rows = rows_of(batch, request, block)
        keys[pages, rows, 0] = torch.randn(len(rows), COLUMNS, generator=torch.Generator().manual_seed(seed + request)).bfloat16()
    packed = quantise_cache(keys, kind)
    assert packed.shape[-1] == spec.state_content_bytes
    storage = empty_cache(kind, blocks, block, page_stride=2 * spec.page_size_bytes, fill=0xFF)
    storage.copy_(packed.view(torch.uint8))
    values = dequantise_cache(packed, kind).float()
    worth = [values[pages, rows, 0] for pages, rows in (rows_of(batch, r, block) for r in range(batch.num_reqs))]
    assert all(torch.isfinite(each).all() for each in worth)
    return storage.transpose(1, 2), worth


@dataclass
class Model:
    """A layer of a kind, and a batch of it: its metadata by vLLM's builder, both caches and the keys that each token attends to."""

    kind: Kind
    requests: list[Request]
    folder: Path
    heads: int = 8
    padded_tokens: int | None = None

    def __post_init__(self) -> None:
        kind, draw = self.kind, torch.Generator().manual_seed(8)
        self.buffer = torch.full((256, TOPK), -1, dtype=torch.int32)
        self.layer, self.config = layer_of(kind, self.heads, self.buffer, self.folder)
        self.window = self.layer.swa_cache_layer
        self.spec = self.window.get_kv_cache_spec(self.config)
        self.batch = batch_of(self.requests, self.spec.block_size, padded_tokens=self.padded_tokens)
        cache, self.swa_keys = cache_of(self.batch, kind.formats[0], self.spec, 10)
        self.window.bind_kv_cache(cache)
        self.tokens = self.batch.num_actual_tokens
        self.q = torch.zeros(self.tokens, self.layer.padded_heads, COLUMNS, dtype=torch.bfloat16)
        self.q[:, : self.heads] = torch.randn(self.tokens, self.heads, COLUMNS, generator=draw).bfloat16()
        self.layer.attn_sink.data[: self.heads] = torch.linspace(-3, 4, self.heads)
        if not kind.compressed:
            return
        spec = self.layer.get_kv_cache_spec(self.config)
        self.states = batch_of([Request(0, request.keys // kind.ratio) for request in self.requests], spec.num_states, seed=1)
        cache, self.keys = cache_of(self.states, kind.formats[1], spec, 20)
        self.layer.bind_kv_cache(cache)
        for request in range(self.batch.num_reqs):
            for token, position in self.positions(request):
                seen = (position + 1) // kind.ratio
                ids = torch.arange(seen) if kind.ratio == 128 else torch.randperm(seen, generator=draw)[:TOPK]
                self.buffer[token, : len(ids)] = ids

    def positions(self, request: int) -> list[tuple[int, int]]:
        """Return (number, position) of each query token of a request."""
        own, keys = query_rows(self.batch, request), int(self.batch.seq_lens[request])
        return [(token, keys - (own.stop - token)) for token in range(own.start, own.stop)]

    @cached_property
    def metadata(self) -> dict[str, Any]:
        """Return vLLM's metadata of the window's cache, and what layers read of those of the compressed one."""
        builder = self.window.get_attn_backend().get_builder_cls()
        with set_current_vllm_config(self.config):
            found = {SWA: builder(self.spec, [SWA], self.config, torch.device("cpu")).build(0, self.batch)}
        return found | {LAYER: self._compressed(found[SWA])} if self.kind.compressed else found

    def _compressed(self, swa: Any) -> Any:
        """Return the metadata of the compressed cache. Layers of ratio 128 have their indices in there."""
        decoded, table = swa.num_decode_tokens, self.states.block_table_tensor
        owners = torch.searchsorted(self.batch.query_start_loc[1:], torch.arange(self.tokens), right=True).clamp(max=len(table) - 1)
        slots, counts = global_indices(self.buffer[:decoded], owners, table, self.kind.block // self.kind.ratio, swa.is_valid_token)
        return SimpleNamespace(
            block_table=table,
            block_size=self.kind.block,
            c128a_global_decode_topk_indices=torch.nn.functional.pad(slots, (0, 8), value=-1)[:, None, :TOPK],
            c128a_decode_topk_lens=counts,
            c128a_prefill_topk_indices=self.buffer[decoded : self.tokens],
        )

    def run(self) -> Tensor:
        """Return the output of the layer [tokens, heads, 512], NaN where it wrote nothing."""
        out = torch.full_like(self.q, float("nan"))
        with set_forward_context(self.metadata, self.config), torch.inference_mode():
            self.layer.forward_mqa(self.q, self.q[:, 0], torch.empty(0), out)
        return out[:, : self.heads]

    def expected(self) -> Tensor:
        """Return what every token attends to: the window up to itself, and the compressed keys in its row of the buffer."""
        out, sinks = torch.zeros(self.tokens, self.heads, COLUMNS), self.layer.attn_sink.detach()[: self.heads]
        for request in range(self.batch.num_reqs):
            for token, position in self.positions(request):
                keys = [self.swa_keys[request][max(position - WINDOW + 1, 0) : position + 1]]
                if self.kind.compressed:
                    keys.append(self.keys[request][self.buffer[token][self.buffer[token] >= 0].long()])
                out[token] = attend_to_all(self.q[token, : self.heads].float(), torch.cat(keys), SCALE, sinks)[0]
        return out


def stand_in(monkeypatch: Any, capability: DeviceCapability) -> None:
    """Have vLLM make layers for a device that is not there, and replace its Triton kernels around the two calls by torch."""
    monkeypatch.setattr(torch.cuda, "Event", object)
    monkeypatch.setattr(parallel_state, "get_tp_group", lambda: SimpleNamespace(world_size=1, rank_in_group=0))
    monkeypatch.setattr(type(sparse_swa.current_platform), "device_type", "cpu")
    monkeypatch.setattr(type(sparse_swa.current_platform), "get_device_capability", lambda *_, **__: capability)
    monkeypatch.setattr(sparse_swa, "_COMPUTE_SWA_INDICES_AND_LENS_KERNEL", _window)
    monkeypatch.setattr(sparse_swa, "_COMPUTE_PREFILL_METADATA_KERNEL", _gather_lengths)
    monkeypatch.setattr(sparse_swa, "get_mla_metadata", sparse_swa.get_mla_metadata)  # restored behind the test, as the names below
    for model in ARCHITECTURES:
        module = import_module(f"vllm.models.{model}.nvidia.flashmla")
        for name in ("flash_mla_with_kvcache", "flash_mla_sparse_fwd"):
            monkeypatch.setattr(module, name, getattr(module, name))
        monkeypatch.setattr(module, "compute_global_topk_indices_and_lens", global_indices)
        monkeypatch.setattr(module, "dequantize_and_gather_k_cache", _gather)
        monkeypatch.setattr(module, "combine_topk_swa_indices", _combine)
        monkeypatch.setattr(import_module(f"vllm.models.{model}.attention"), "get_tensor_model_parallel_world_size", lambda: 1)


def _window(slots: Tensor, lens: Tensor, window: int, *given: Any, num_tokens: int, token_offset: int, **_: Any) -> None:
    _, _, _, starts, lengths, owners, valid, table, block, _ = given
    slots[:num_tokens] = -1
    for row in range(num_tokens):
        token = row + token_offset
        owner = int(owners[token])
        end = int(lengths[owner] - starts[owner + 1]) + token + 1
        seen = torch.arange(max(end - window, 0), end) if valid[token] else torch.arange(0)
        lens[row] = len(seen)
        slots[row].view(-1)[: len(seen)] = (table[owner, seen // block] * block + seen % block).to(torch.int32)


def _gather_lengths(out: Tensor, lengths: Tensor, starts: Tensor, replay: Tensor, prefills: int, decodes: int, window: int) -> None:
    counts = (starts[1:] - starts[:-1])[decodes : decodes + prefills]
    out[:] = counts + (lengths[decodes : decodes + prefills] - counts).clamp(max=window - 1)


def global_indices(ids: Tensor, owners: Tensor, table: Tensor, block: int, valid: Tensor) -> tuple[Tensor, Tensor]:
    """Torch for vLLM's kernel that turns a request's entries into slots, -1 for none, and counts them."""
    known = ids.clamp(min=0).long()
    slots = table[owners[: len(ids)].long()].gather(1, known // block).long() * block + known % block
    return torch.where(ids >= 0, slots, -1).to(torch.int32), torch.where(valid[: len(ids)], (ids >= 0).sum(1), 0).to(torch.int32)


def _gather(out: Tensor, cache: Tensor, *, seq_lens: Tensor, gather_lens: Tensor | None, block_table: Tensor, **options: Any) -> None:
    kind = {584: "fp8_584", 528: "v41", 288: "v41_fp4"}[cache.shape[-1]]
    values, block, offset = dequantise_cache(cache.unsqueeze(2), kind)[:, :, 0], options["block_size"], options["offset"]
    assert cache.shape[1] == block
    for request, length in enumerate(seq_lens.tolist()):
        count = length if gather_lens is None else int(gather_lens[request])
        position = torch.arange(length - count, length)
        out[request, offset : offset + count] = values[block_table[request, position // block].long(), position % block]


def _combine(
    ids: Tensor, starts: Tensor, lengths: Tensor, gathered: Tensor, *sizes: int, out: tuple[Tensor, Tensor], **_: Any
) -> tuple[Tensor, Tensor]:
    window, ratio, topk, rows, first = sizes
    slots, counts = out
    slots.fill_(-1)
    for request in range(len(lengths)):
        begin, end = (starts[request : request + 2] - starts[0]).tolist()
        for token in range(begin, end):
            position = int(lengths[request]) - (end - token)
            chosen = min((position + 1) // ratio, topk) if topk else 0
            seen = torch.arange(max(position - window + 1, 0), position + 1) - int(lengths[request] - gathered[request]) + first
            row = torch.cat((ids[token, :chosen], seen)) + rows * request
            slots[token, : len(row)], counts[token] = row.to(torch.int32), len(row)
    return slots, counts
