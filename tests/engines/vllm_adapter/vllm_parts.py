"""Parts of vLLM as its engine makes them, for tests without a GPU: configurations, layers, batches."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from vllm.config import (
    CacheConfig,
    CUDAGraphMode,
    DeviceConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    VllmConfig,
    set_current_vllm_config,
)
from vllm.model_executor.layers.attention.mla_attention import MLAAttention
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.mla.prefill.registry import MLAPrefillBackendEnum
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from cute_mla.reference import attention, visible_keys

LATENT, ROPE, NOPE, V = 512, 64, 128, 128  # of DeepSeek-V3
SCALE = (NOPE + ROPE) ** -0.5
LAYER = "model.layers.0.self_attn.attn"


class Columns(NamedTuple):
    """Columns of a model: of a key, latent and rotary, and of a head, without rotary embedding and of values."""

    latent: int = LATENT
    rope: int = ROPE
    nope: int = NOPE
    v: int = V

    @property
    def scale(self) -> float:
        """Return the scale of the softmax."""
        return float((self.nope + self.rope) ** -0.5)


DEEPSEEK_V3 = Columns()
GLM_4_7_FLASH = Columns(nope=192, v=256)
GLM_5_3_FLASH = Columns(rope=0, nope=256, v=256)
MISTRAL_SMALL_4 = Columns(latent=256, nope=64)

_MODEL = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 1,
    "q_lora_rank": 64,
    "vocab_size": 1024,
    "max_position_embeddings": 2048,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 64,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}


@dataclass(frozen=True)
class Setting:
    """A model and how it is served. topk: indices of a token; None of a dense model. graphs: vLLM's cudagraph_mode.

    ranks: that share the keys of requests. interleave: keys that a rank takes in turn.
    """

    heads: int
    dtype: torch.dtype = torch.bfloat16
    cache: str = "auto"
    block_size: int = 64
    topk: int | None = None
    columns: Columns = DEEPSEEK_V3
    graphs: CUDAGraphMode = CUDAGraphMode.NONE
    ranks: int = 1
    interleave: int = 1


def configuration(setting: Setting, folder: Path) -> VllmConfig:
    """VLLM's configuration, of a model whose config.json is written to a folder."""
    heads = {"num_attention_heads": setting.heads, "num_key_value_heads": setting.heads}
    sparse = {} if setting.topk is None else {"index_topk": setting.topk}
    names = ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
    columns = dict(zip(names, setting.columns, strict=True))
    (folder / "config.json").write_text(json.dumps({**_MODEL, **columns, **heads, **sparse}))
    model = ModelConfig(model=str(folder), skip_tokenizer_init=True, dtype=str(setting.dtype).removeprefix("torch."), max_model_len=2048)
    config = VllmConfig(
        model_config=model,
        device_config=DeviceConfig(device="cpu"),
        cache_config=CacheConfig(block_size=setting.block_size, cache_dtype=setting.cache),
        scheduler_config=SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=256, max_model_len=2048, is_encoder_decoder=False),
        parallel_config=ParallelConfig(),
    )
    config.compilation_config.cudagraph_mode = setting.graphs  # vLLM has none without a GPU
    config.parallel_config.decode_context_parallel_size = setting.ranks  # more ranks would be more processes
    config.parallel_config.cp_kv_cache_interleave_size = setting.interleave
    return config


class Projection(torch.nn.Module):
    """kv_b_proj of one rank, unquantised."""

    quant_method = None

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(weight, requires_grad=False)
        self.params_dtype = weight.dtype

    def forward(self, latent: Tensor) -> tuple[Tensor, None]:
        return latent @ self.weight.T, None


@dataclass
class Served:
    """A layer with its configuration and metadata builder."""

    setting: Setting
    config: VllmConfig
    layer: MLAAttention
    builder: Any

    def build(self, batch: CommonAttentionMetadata) -> Any:
        with set_current_vllm_config(self.config):
            return self.builder.build(0, batch)

    def mqa(self, q: Any, cache: Tensor, metadata: Any) -> tuple[Tensor, Tensor | None]:
        """forward_mqa as the layer calls it, under the engine's inference mode."""
        with set_current_vllm_config(self.config), torch.inference_mode():
            return self.layer.impl.forward_mqa(q, cache, metadata, self.layer)


def serve(setting: Setting, folder: Path, name: str = "CUTE_MLA", **options: Any) -> Served:
    """Return a layer of this backend, and of our prefill backend, as vLLM makes it. options: of vLLM's layer."""
    config = configuration(setting, folder)
    backend = AttentionBackendEnum[name].get_class()
    latent, rope, nope, v = setting.columns
    weight = torch.randn(setting.heads * (nope + v), latent, generator=torch.Generator().manual_seed(1)) * latent**-0.5
    sparse = (
        {} if setting.topk is None else {"use_sparse": True, "topk_indices_buffer": torch.full((256, setting.topk), -1, dtype=torch.int32)}
    )
    before = torch.get_default_dtype()
    torch.set_default_dtype(setting.dtype)
    try:
        with set_current_vllm_config(config):
            layer = MLAAttention(
                num_heads=setting.heads,
                scale=setting.columns.scale,
                qk_nope_head_dim=nope,
                qk_rope_head_dim=rope,
                v_head_dim=v,
                q_lora_rank=64,
                kv_lora_rank=latent,
                kv_b_proj=Projection(weight.to(setting.dtype)),
                cache_config=config.cache_config,
                prefix=LAYER,
                attn_backend=backend,
                prefill_backend_cls=MLAPrefillBackendEnum["CUTE_MLA"].get_class(),
                **sparse,
                **options,
            )
            layer.process_weights_after_loading(setting.dtype)
            spec = backend.customize_spec(layer.get_kv_cache_spec(config))
            builder = backend.get_builder_cls()(spec, [LAYER], config, torch.device("cpu"))
    finally:
        torch.set_default_dtype(before)
    return Served(setting, config, layer, builder)


@dataclass(frozen=True)
class Request:
    """New query tokens, and keys in the cache with theirs."""

    tokens: int
    keys: int


def batch_of(requests: Sequence[Request], block_size: int, seed: int = 0, padded_tokens: int | None = None) -> CommonAttentionMetadata:
    """Describe a batch as vLLM does, over pages in random order. No request owns page 0.

    Requests without tokens pad a CUDA graph; the batch then counts padded_tokens.
    """
    starts = torch.tensor([0, *[request.tokens for request in requests]]).cumsum(0).to(torch.int32)
    lengths = torch.tensor([request.keys for request in requests], dtype=torch.int32)
    pages = [-(-request.keys // block_size) for request in requests]
    table = torch.zeros(len(requests), max(*pages, 1), dtype=torch.int32)
    order = 1 + torch.randperm(sum(pages), generator=torch.Generator().manual_seed(seed)).to(torch.int32)
    for row, own in zip(table, order.split(pages), strict=True):
        row[: len(own)] = own
    slots = [
        table[r, position // block_size].item() * block_size + position % block_size
        for r, request in enumerate(requests)
        for position in range(request.keys - request.tokens, request.keys)
    ]
    tokens = len(slots) if padded_tokens is None else padded_tokens
    slots += [-1] * (tokens - len(slots))
    return CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=lengths,
        num_reqs=len(requests),
        num_actual_tokens=tokens,
        max_query_len=max(request.tokens for request in requests),
        max_seq_len=max(request.keys for request in requests),
        block_table_tensor=table,
        slot_mapping=torch.tensor(slots, dtype=torch.int64),
        seq_lens_cpu_upper_bound=lengths.clone(),
    )


def empty_cache(batch: CommonAttentionMetadata, setting: Setting) -> Tensor:
    """[blocks, block size, columns] as vLLM allocates it, full of NaN, blocks twice as far apart as they need to be."""
    blocks, columns = int(batch.block_table_tensor.max()) + 1, setting.columns.latent + setting.columns.rope
    if setting.cache == "fp8_ds_mla":
        storage = torch.full((2 * blocks, setting.block_size, 656), 0xFF, dtype=torch.uint8)
    elif setting.cache == "auto":
        storage = torch.full((2 * blocks, setting.block_size, columns), math.nan, dtype=setting.dtype)
    else:
        storage = torch.full((2 * blocks, setting.block_size, columns), 0xFF, dtype=torch.uint8)
    return storage[::2]


def rows_of(batch: CommonAttentionMetadata, request: int, block_size: int) -> Tensor:
    """Return blocks and rows of all keys of a request: (int64 [keys], int64 [keys])."""
    position = torch.arange(int(batch.seq_lens[request]))
    return torch.stack((batch.block_table_tensor[request, position // block_size].long(), position % block_size))


def query_rows(batch: CommonAttentionMetadata, request: int) -> slice:
    """Return the query tokens of a request."""
    start, end = batch.query_start_loc[request : request + 2].tolist()
    return slice(start, end)


def agree(out: Tensor, wanted: Tensor, absolute: float = 5e-3) -> None:
    """Assert that bf16 or fp16 results are those of fp32, to within the rounding of probabilities and results."""
    torch.testing.assert_close(out.float(), wanted, rtol=1e-2, atol=absolute)


def keys_of(batch: CommonAttentionMetadata, setting: Setting) -> list[tuple[Tensor, Tensor]]:
    """Return latent and rotary columns [keys, columns] of all keys of each request."""
    generator = torch.Generator().manual_seed(5)
    lengths = batch.seq_lens.tolist()

    def drawn(keys: int, columns: int) -> torch.Tensor:
        return torch.randn(keys, columns, generator=generator).to(setting.dtype)

    return [(drawn(n, setting.columns.latent), drawn(n, setting.columns.rope)) for n in lengths]


def layer_output(served: Served, batch: CommonAttentionMetadata, q: Tensor, kv: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """[tokens, heads * values]: every request over its decompressed keys."""
    columns = served.setting.columns
    weight = served.layer.kv_b_proj.weight.float().view(-1, columns.nope + columns.v, columns.latent)
    out = torch.zeros(len(q), weight.shape[0], columns.v)
    for request, (latent, rotary) in enumerate(kv):
        up = torch.einsum("hdl,tl->htd", weight, latent.float())
        k = torch.cat((up[..., : columns.nope], rotary.float().expand(len(weight), -1, -1)), dim=-1)
        own = query_rows(batch, request)
        mine = q[own].float().transpose(0, 1)
        found, _ = attention(mine, k, up[..., columns.nope :], columns.scale, visible_keys(mine.shape[1], len(latent), True, q.device))
        out[own] = found.transpose(0, 1)
    return out.flatten(1)


def merged(parts: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """Merge results as vLLM's ranks do: by natural log, with -inf for ranks without keys."""
    lse = torch.stack([lse for _, lse in parts])
    weights = (lse - lse.logsumexp(0)).exp().nan_to_num(0.0)
    return sum(weight.unsqueeze(-1) * out.float() for weight, (out, _) in zip(weights, parts, strict=True))


def gather_keys(src_cache: Tensor, dst: Tensor, *, block_table: Tensor, num_tokens: int, **options: Any) -> None:
    """Torch for vLLM's op that gathers keys of requests in a row, dequantised."""
    request = options["token_to_seq"][:num_tokens].long()
    position = torch.arange(num_tokens) - options["cu_seq_lens"][request] + options["seq_starts"][request]
    rows = src_cache[block_table[request, position // src_cache.shape[1]].long(), position % src_cache.shape[1]]
    dst[:num_tokens] = rows.float() * options["scale"] if rows.dtype == torch.float8_e4m3fn else rows
