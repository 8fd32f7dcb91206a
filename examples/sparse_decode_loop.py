"""A tiny DeepSeek-V3.2: prefill of three prompts, then 16 greedy decode steps, in which tokens attend to the keys that an indexer chooses.

Runs on a Hopper or Blackwell GPU if there is one, else on the simulated device. At the end the output of every step is compared with fp32
torch over the keys chosen, and these with the keys that fp32 torch chooses. Run after `cute-mla build` (or `make build`):
python examples/sparse_decode_loop.py [sm90|sm100|sm120]
The argument is the architecture of the simulated device.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn.functional import layer_norm, rms_norm

import cute_mla
from cute_mla.layer import Indexer, IndexerWeights, MlaAttention, MlaBatch, MlaConfig, MlaWeights, plan_batch

GPUS = ((9, 0), (10, 0), (10, 3), (12, 0), (12, 1))  # compute capabilities that kernels are built for
LAYERS, HIDDEN, HEADS, VOCABULARY = 2, 128, 2, 64
Q_LORA, INDEX_HEADS, TOPK = 64, 4, 32  # a token attends to at most so many keys
PAGE_SIZE, STEPS = 64, 16
PROMPTS = [60, 7, 20]  # tokens; the first has more than TOPK from the beginning, the last comes to have more during decode

# The config.json of a checkpoint. DeepSeek-V3.2 has hidden_size 7168, 128 heads, and an indexer of 64 heads that chooses 2048 keys.
CONFIG = MlaConfig.from_hugging_face(
    {
        "model_type": "deepseek_v32",
        "hidden_size": HIDDEN,
        "num_attention_heads": HEADS,
        "q_lora_rank": Q_LORA,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "index_topk": TOPK,
        "index_n_heads": INDEX_HEADS,
        "index_head_dim": 128,
    }
)


def random_layer(dtype: torch.dtype) -> dict[str, Tensor]:
    """Draw the attention weights of a layer, under the names of a checkpoint."""
    shapes = {
        "q_a_proj": (Q_LORA, HIDDEN),
        "q_b_proj": (HEADS * 192, Q_LORA),
        "kv_a_proj_with_mqa": (576, HIDDEN),
        "kv_b_proj": (HEADS * 256, 512),
        "o_proj": (HIDDEN, HEADS * 128),
        "indexer.wq_b": (INDEX_HEADS * 128, Q_LORA),
        "indexer.wk": (128, HIDDEN),
        "indexer.weights_proj": (INDEX_HEADS, HIDDEN),
    }
    drawn = {name: torch.randn(rows, columns) * columns**-0.5 for name, (rows, columns) in shapes.items()}
    norms = {"q_a_layernorm": torch.ones(Q_LORA), "kv_a_layernorm": torch.ones(512), "indexer.k_norm": torch.ones(128)}
    weights = {f"{name}.weight": weight.to(dtype) for name, weight in (drawn | norms).items()}
    return weights | {"indexer.k_norm.bias": torch.zeros(128, dtype=dtype)}


@dataclass(frozen=True)
class Model:
    """Embeddings, residual layers of attention only, and the output projection.

    caches, index_caches: one per layer, [pages, 64, 1, 576] and uint8 [pages, 64, 1, 132], in whose slots the same keys are.
    """

    embeddings: Tensor
    output_projection: Tensor
    layers: list[dict[str, Tensor]]
    attention: list[MlaAttention]
    caches: list[Tensor]
    index_caches: list[Tensor]

    @staticmethod
    def random(pages: int, device: str, dtype: torch.dtype) -> Model:
        """Create a model with random weights and caches of this many pages."""
        embeddings, output_projection = torch.randn(2, VOCABULARY, HIDDEN).to(dtype).to(device)
        layers = [random_layer(dtype) for _ in range(LAYERS)]
        attention = []
        for layer in layers:
            indexer = Indexer(CONFIG, IndexerWeights.from_tensors(layer, CONFIG))
            attention.append(MlaAttention(CONFIG, MlaWeights.from_tensors(layer, CONFIG), indexer).to(device))
        caches = [torch.zeros(pages, PAGE_SIZE, 1, 576, dtype=dtype, device=device) for _ in range(LAYERS)]
        index_caches = [torch.zeros(pages, PAGE_SIZE, 1, 132, dtype=torch.uint8, device=device) for _ in range(LAYERS)]
        return Model(embeddings, output_projection, layers, attention, caches, index_caches)

    def step(
        self, tokens: Tensor, new: Sequence[int], contexts: Sequence[int], block_table: Tensor, decodes: int
    ) -> tuple[Tensor, list[list[Tensor]]]:
        """Return hidden states of new tokens, packed, and for each layer the positions that each of these tokens attends to."""
        batch = plan_batch(new, contexts, block_table, PAGE_SIZE, decodes=decodes)
        states, chosen = self.embeddings[tokens], []
        for attention, cache, index_cache in zip(self.attention, self.caches, self.index_caches, strict=True):
            states = states + attention(rms_norm(states, (HIDDEN,)), cache, batch, index_cache=index_cache)
            chosen.append(positions(batch, block_table))
        return states, chosen

    def naive(self, tokens: Tensor, chosen: list[Tensor]) -> tuple[Tensor, float]:
        """Return hidden states of one whole sequence in fp32, given the keys that tokens attend to in each layer, bool [tokens, tokens].

        The second result is the share of these keys that fp32 chooses as well.
        """
        states = self.embeddings.cpu().float()[tokens.cpu()]
        shares = []
        for layer, seen in zip(self.layers, chosen, strict=True):
            weights = {name: weight.float() for name, weight in layer.items()}
            out, own = naive_attention(rms_norm(states, (HIDDEN,)), weights, seen)
            states = states + out
            shares.append(((own & seen).sum() / seen.sum()).item())
        return states, min(shares)


def positions(batch: MlaBatch, block_table: Tensor) -> list[Tensor]:
    """Return the positions that the keys of each new token have in its request."""
    if batch.decode is not None and batch.selection.decode is not None:
        slots, _ = batch.selection.decode
        page_of = block_table.cpu().unsqueeze(1) == (slots.cpu() // PAGE_SIZE)[:, 0].unsqueeze(2)  # [requests, topk, columns of the table]
        place = page_of.int().argmax(dim=2) * PAGE_SIZE + slots.cpu()[:, 0] % PAGE_SIZE
        return [own[indices >= 0] for own, indices in zip(place, slots.cpu()[:, 0], strict=True)]
    if batch.prefill is None or batch.selection.prefill is None:
        raise SystemExit("nobody has chosen")
    rows = batch.selection.prefill.indices.cpu()[:, 0]
    return [own[own >= 0].long() - first for own, first in zip(rows, batch.prefill.rows().first.cpu(), strict=True)]


def naive_attention(states: Tensor, weights: dict[str, Tensor], seen: Tensor) -> tuple[Tensor, Tensor]:
    """Compute attention over the keys seen, bool [tokens, tokens], and which keys the indexer chooses, by transformers' formulas."""
    length = len(states)
    angles = torch.outer(torch.arange(length), 10_000.0 ** -(torch.arange(32) / 32))

    def rotate(columns: Tensor) -> Tensor:
        pairs = torch.view_as_complex(columns.unflatten(-1, (32, 2)).contiguous())
        return torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)).flatten(-2)

    def rotate_halves(columns: Tensor) -> Tensor:
        """Turn the first 64 columns, of which i and i + 32 are a pair."""
        halves = rotate(columns[..., :64].unflatten(-1, (2, 32)).transpose(-1, -2).flatten(-2))
        return torch.cat((halves.unflatten(-1, (32, 2)).transpose(-1, -2).flatten(-2), columns[..., 64:]), dim=-1)

    latent_q = rms_norm(states @ weights["q_a_proj.weight"].T, (Q_LORA,), eps=CONFIG.rms_norm_eps)
    q = (latent_q @ weights["q_b_proj.weight"].T).view(length, HEADS, 192).transpose(0, 1)
    latent, rotary = (states @ weights["kv_a_proj_with_mqa.weight"].T).split((512, 64), dim=-1)
    kv = (rms_norm(latent, (512,), eps=CONFIG.rms_norm_eps) @ weights["kv_b_proj.weight"].T).view(length, HEADS, 256).transpose(0, 1)
    k = torch.cat((kv[..., :128], rotate(rotary).expand(HEADS, -1, -1)), dim=-1)
    scores = torch.cat((q[..., :128], rotate(q[..., 128:])), dim=-1) @ k.transpose(1, 2) * 192**-0.5
    out = scores.masked_fill(~seen, -math.inf).softmax(dim=-1) @ kv[..., 128:]

    index_q = rotate_halves((latent_q @ weights["indexer.wq_b.weight"].T).view(length, INDEX_HEADS, 128).transpose(0, 1))
    index_k = rotate_halves(layer_norm(states @ weights["indexer.wk.weight"].T, (128,), eps=1e-6))
    logits = torch.einsum("th,htk->tk", states @ weights["indexer.weights_proj.weight"].T, (index_q @ index_k.T).relu())
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    best = logits.masked_fill(~causal, -math.inf).topk(min(TOPK, length), dim=-1).indices
    return out.transpose(0, 1).flatten(1) @ weights["o_proj.weight"].T, torch.zeros_like(causal).scatter_(1, best, value=True) & causal


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
    sequences = [[prompt] for prompt in (torch.randint(VOCABULARY, (length,), device=device) for length in PROMPTS)]
    masks = [[torch.zeros(length + STEPS, length + STEPS, dtype=torch.bool) for _ in range(LAYERS)] for length in PROMPTS]

    def record(chosen: list[list[Tensor]], new: Sequence[int], contexts: Sequence[int]) -> None:
        """Mark the keys that new tokens attend to."""
        firsts = accumulate(new, initial=0)
        for own, count, context, first in zip(masks, new, contexts, firsts, strict=False):
            for mask, of_layer in zip(own, chosen, strict=True):
                for token in range(count):
                    mask[context + token, of_layer[first + token]] = True

    # Two SMs are enough for three requests and simulate faster than a whole GPU.
    with nullcontext() if on_gpu else cute_mla.simulate(arch, sm_count=2) as simulated:
        states, chosen = model.step(torch.cat([own[0] for own in sequences]), PROMPTS, [0] * len(PROMPTS), block_table, decodes=0)
        record(chosen, PROMPTS, [0] * len(PROMPTS))
        parts = [[own] for own in states.split(PROMPTS)]
        for step in range(STEPS):
            tokens = (torch.stack([own[-1][-1] for own in parts]) @ model.output_projection.T).argmax(dim=-1)  # greedy
            new, contexts = [1] * len(PROMPTS), [length + step for length in PROMPTS]
            states, chosen = model.step(tokens, new, contexts, block_table, decodes=len(PROMPTS))
            record(chosen, new, contexts)
            for own, sequence, state, token in zip(parts, sequences, states, tokens, strict=True):
                own.append(state[None])
                sequence.append(token[None])

    if simulated is not None:
        print(f"simulated {arch} with {simulated.sm_count} SMs: {simulated.launches} launches in {simulated.seconds:.1f} s")
    error, least_share = 0.0, 1.0
    for own, sequence, mask in zip(parts, sequences, masks, strict=True):
        expected, share = model.naive(torch.cat(sequence), mask)
        error = max(error, ((torch.cat(own).cpu().float() - expected).abs().max() / expected.abs().max()).item())
        least_share = min(least_share, share)
        print("tokens", *torch.cat(sequence[1:]).tolist())
    print(f"largest error against fp32 torch, relative to the largest state: {error:.1e}")
    print(f"least share of the keys chosen that fp32 torch chooses too: {least_share:.3f}")
    if error > 0.02 or least_share < 0.9:
        raise SystemExit("the result is wrong")


if __name__ == "__main__":
    main(*sys.argv[1:])
