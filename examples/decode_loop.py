"""A tiny MLA model: prefill of three prompts, then 16 greedy decode steps over a paged cache.

Runs on a Hopper or Blackwell GPU if there is one, else on the simulated device. At the end the output of every step is compared with fp32
torch. Run after `cute-mla build` (or `make build`):  python examples/decode_loop.py [sm90|sm100|sm120]
The argument is the architecture of the simulated device.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import rms_norm

import cute_mla
from cute_mla.layer import MlaAttention, MlaConfig, MlaWeights, plan_batch

GPUS = ((9, 0), (10, 0), (10, 3), (12, 0), (12, 1))  # compute capabilities that kernels are built for
LAYERS, HIDDEN, HEADS, VOCABULARY = 2, 128, 2, 64
PAGE_SIZE, STEPS = 64, 16
PROMPTS = [60, 7, 1]  # tokens; the first request reaches its second page during decode

# The config.json of a checkpoint. DeepSeek-V2-Lite has hidden_size 2048 and 16 heads.
CONFIG = MlaConfig.from_hugging_face(
    {
        "hidden_size": HIDDEN,
        "num_attention_heads": HEADS,
        "q_lora_rank": None,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
    }
)


def random_layer(dtype: torch.dtype) -> dict[str, Tensor]:
    """Draw the attention weights of a layer, under the names of a checkpoint that load_weights reads."""

    def matrix(rows: int, columns: int) -> Tensor:
        return (torch.randn(rows, columns) * columns**-0.5).to(dtype)

    return {
        "q_proj.weight": matrix(HEADS * 192, HIDDEN),
        "kv_a_proj_with_mqa.weight": matrix(576, HIDDEN),
        "kv_a_layernorm.weight": torch.ones(512, dtype=dtype),
        "kv_b_proj.weight": matrix(HEADS * 256, 512),
        "o_proj.weight": matrix(HIDDEN, HEADS * 128),
    }


@dataclass(frozen=True)
class Model:
    """Embeddings, residual layers of attention only, and the output projection. caches: one per layer, [pages, 64, 1, 576]."""

    embeddings: Tensor
    output_projection: Tensor
    layers: list[dict[str, Tensor]]
    attention: list[MlaAttention]
    caches: list[Tensor]

    @staticmethod
    def random(pages: int, device: str, dtype: torch.dtype) -> Model:
        """Create a model with random weights and caches of this many pages."""
        embeddings, output_projection = torch.randn(2, VOCABULARY, HIDDEN).to(dtype).to(device)
        layers = [random_layer(dtype) for _ in range(LAYERS)]
        attention = [MlaAttention(CONFIG, MlaWeights.from_tensors(layer, CONFIG).to(device)) for layer in layers]
        caches = [torch.zeros(pages, PAGE_SIZE, 1, 576, dtype=dtype, device=device) for _ in range(LAYERS)]
        return Model(embeddings, output_projection, layers, attention, caches)

    def step(self, tokens: Tensor, new: Sequence[int], contexts: Sequence[int], block_table: Tensor, decodes: int) -> Tensor:
        """Return hidden states of new tokens, packed, given the cached tokens of each request. One plan serves all layers."""
        batch = plan_batch(new, contexts, block_table, PAGE_SIZE, decodes=decodes)
        states = self.embeddings[tokens]
        for attention, cache in zip(self.attention, self.caches, strict=True):
            states = states + attention(rms_norm(states, (HIDDEN,)), cache, batch)
        return states

    def naive(self, tokens: Tensor) -> Tensor:
        """Return hidden states of one whole sequence without a cache, with keys and values of every head, in fp32."""
        states = self.embeddings.cpu().float()[tokens.cpu()]
        for layer in self.layers:
            states = states + naive_attention(rms_norm(states, (HIDDEN,)), {name: weight.float() for name, weight in layer.items()})
        return states


def naive_attention(states: Tensor, weights: dict[str, Tensor]) -> Tensor:
    """Compute attention from a layer's weights by the formulas of the DeepSeek-V2 paper."""
    length = len(states)
    angles = torch.outer(torch.arange(length), 10_000.0 ** -(torch.arange(32) / 32))

    def rotate(columns: Tensor) -> Tensor:
        pairs = torch.view_as_complex(columns.unflatten(-1, (32, 2)).contiguous())
        return torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)).flatten(-2)

    q = (states @ weights["q_proj.weight"].T).view(length, HEADS, 192).transpose(0, 1)
    latent, rotary = (states @ weights["kv_a_proj_with_mqa.weight"].T).split((512, 64), dim=-1)
    kv = (rms_norm(latent, (512,), eps=CONFIG.rms_norm_eps) @ weights["kv_b_proj.weight"].T).view(length, HEADS, 256).transpose(0, 1)
    k = torch.cat((kv[..., :128], rotate(rotary).expand(HEADS, -1, -1)), dim=-1)
    scores = torch.cat((q[..., :128], rotate(q[..., 128:])), dim=-1) @ k.transpose(1, 2) * 192**-0.5
    future = torch.ones(length, length, dtype=torch.bool).triu(1)
    out = scores.masked_fill(future, -math.inf).softmax(dim=-1) @ kv[..., 128:]
    return out.transpose(0, 1).flatten(1) @ weights["o_proj.weight"].T


def paged(lengths: Sequence[int], device: str) -> tuple[int, Tensor]:
    """Return the number of pages for sequences of these lengths, and the block table int32 [requests, pages per request]."""
    counts = [math.ceil(length / PAGE_SIZE) for length in lengths]
    free = torch.randperm(sum(counts), dtype=torch.int32).split(counts)  # pages may lie anywhere
    return sum(counts), torch.nn.utils.rnn.pad_sequence(list(free), batch_first=True, padding_value=-1).to(device)


def main(arch: str = "sm90") -> None:
    """Prefill, decode, and print the largest error of any step."""
    torch.manual_seed(0)
    on_gpu = torch.cuda.is_available() and torch.cuda.get_device_capability() in GPUS
    device = "cuda" if on_gpu else "cpu"
    pages, block_table = paged([length + STEPS for length in PROMPTS], device)
    model = Model.random(pages, device, torch.bfloat16)
    prompts = [torch.randint(VOCABULARY, (length,), device=device) for length in PROMPTS]

    # Two SMs are enough for three requests and simulate faster than a whole GPU.
    with nullcontext() if on_gpu else cute_mla.simulate(arch, sm_count=2) as simulated:
        states = model.step(torch.cat(prompts), PROMPTS, [0] * len(PROMPTS), block_table, decodes=0)
        parts = [[own] for own in states.split(PROMPTS)]
        sequences = [[prompt] for prompt in prompts]
        for step in range(STEPS):
            last = torch.stack([own[-1][-1] for own in parts])
            tokens = (last @ model.output_projection.T).argmax(dim=-1)  # greedy
            contexts = [length + step for length in PROMPTS]
            states = model.step(tokens, [1] * len(PROMPTS), contexts, block_table, decodes=len(PROMPTS))
            for own, sequence, state, token in zip(parts, sequences, states, tokens, strict=True):
                own.append(state[None])
                sequence.append(token[None])

    if simulated is not None:
        print(f"simulated {arch} with {simulated.sm_count} SMs: {simulated.launches} launches in {simulated.seconds:.1f} s")
    error = 0.0
    for own, sequence in zip(parts, sequences, strict=True):
        expected = model.naive(torch.cat(sequence))
        error = max(error, ((torch.cat(own).cpu().float() - expected).abs().max() / expected.abs().max()).item())
        print("tokens", *torch.cat(sequence[1:]).tolist())
    print(f"largest error against fp32 torch, relative to the largest state: {error:.1e}")
    if error > 0.02:
        raise SystemExit("the result is wrong")


if __name__ == "__main__":
    main(*sys.argv[1:])
