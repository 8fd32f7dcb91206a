"""Train sparse attention with its indexer as DeepSeek-V3.2 was: a warm-up over all keys, then both over the keys that the indexer chooses.

In the warm-up the indexer alone learns: attention reads all keys, and the indexer's softmax over them is drawn to attention's
probabilities, summed over the heads. In the sparse phase each token attends to the keys with the greatest scores. A task trains the
attention, and the indexer goes on learning from its probabilities over these keys; its input is detached, so neither loss reaches the
other part.

Runs on a GPU if there is one, else on the simulated device. Where sparse attention has no backward pass, as on Blackwell, the indexer
alone learns in the second phase, too. The same steps by eager autograd in fp64, which replays the choices of keys, say what the losses
should be. Run after `cute-mla build` (or `make build`):  python examples/train_indexer.py [sm90|sm100]
The argument is the architecture of the simulated device.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

import cute_mla
from cute_mla.indexer import attention_head_sums, indexer_loss, indexer_scores, topk_indices

GPUS = {(9, 0): "sm90", (10, 0): "sm100", (10, 3): "sm100"}  # architectures of kernels by compute capability
WITH_BACKWARD = ("sm90",)  # of sparse attention
HIDDEN, HEADS, INDEX_HEADS, TOKENS, TOPK = 32, 2, 4, 12, 4
LATENT, COLUMNS, INDEX_COLUMNS = 512, 576, 128
SCALE = COLUMNS**-0.5
WARM_UP, SPARSE, LEARNING_RATE = 3, 3, 0.002


def draw_weights() -> dict[str, Tensor]:
    """Draw fp32 projections: q, kv and out of attention; index_q, index_k and index_weights of the indexer."""
    draw = torch.Generator().manual_seed(1)
    rows = {
        "q": HEADS * COLUMNS,
        "kv": COLUMNS,
        "index_q": INDEX_HEADS * INDEX_COLUMNS,
        "index_k": INDEX_COLUMNS,
        "index_weights": INDEX_HEADS,
    }
    weights = {name: torch.randn(size, HIDDEN, generator=draw) * HIDDEN**-0.5 for name, size in rows.items()}
    weights["index_weights"] *= INDEX_COLUMNS**-0.5
    weights["out"] = torch.randn(HIDDEN, HEADS * LATENT, generator=draw) * (HEADS * LATENT) ** -0.5
    return weights


@dataclass(frozen=True)
class Projected:
    """Inputs of attention and indexer of the tokens, rounded to bf16: q [T, heads, 576], kv [T, 576], index_q [T, heads, 128], index_k."""

    q: Tensor
    kv: Tensor
    index_q: Tensor
    index_k: Tensor
    index_weights: Tensor

    @staticmethod
    def of(hidden: Tensor, weights: dict[str, Tensor]) -> Projected:
        """Project the tokens. bf16 is kept in the dtype of the weights; gradients pass straight through the rounding."""

        def rounded(x: Tensor) -> Tensor:
            return x + (x.bfloat16().to(x.dtype) - x).detach()

        def project(name: str, x: Tensor) -> Tensor:
            return x @ weights[name].T

        apart = hidden.detach()
        return Projected(
            rounded(project("q", hidden)).unflatten(-1, (HEADS, COLUMNS)),
            rounded(project("kv", hidden)),
            rounded(project("index_q", apart)).unflatten(-1, (INDEX_HEADS, INDEX_COLUMNS)),
            rounded(project("index_k", apart)),
            project("index_weights", apart),
        )


class Kernels:
    """Attention and indexer by cute_mla."""

    def choose(self, tokens: Projected, lengths: Tensor) -> Tensor:
        """Return the positions of the keys with the greatest scores, int32 [T, 1, topk]."""
        every = torch.arange(TOKENS, dtype=torch.int32, device=lengths.device).expand(TOKENS, 1, TOKENS)
        with torch.no_grad():
            scores = indexer_scores(tokens.index_q.bfloat16(), tokens.index_k.bfloat16(), tokens.index_weights, every, lengths)
        return topk_indices(scores, lengths, TOPK).unsqueeze(1)

    def forward(self, tokens: Projected, indices: Tensor, lengths: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return attention's out [T, heads, 512] and the indexer's loss of each token."""
        q, kv = tokens.q.bfloat16(), tokens.kv.bfloat16().unsqueeze(1)
        out, _, lse = cute_mla.flash_mla_sparse_fwd(q, kv, indices, SCALE, topk_length=lengths)
        with torch.no_grad():
            sums = attention_head_sums(q, kv, lse, indices, SCALE, topk_length=lengths)
        scores = indexer_scores(tokens.index_q.bfloat16(), tokens.index_k.bfloat16(), tokens.index_weights, indices, lengths)
        return out, indexer_loss(scores, sums)


class Eager:
    """Attention and indexer by torch, over masks of keys. choices: the choices of the kernels, in turn."""

    def __init__(self, choices: Iterator[Tensor]) -> None:
        self.choices = choices

    def choose(self, tokens: Projected, lengths: Tensor) -> Tensor:
        """Return the next choice."""
        return next(self.choices)

    def forward(self, tokens: Projected, indices: Tensor, lengths: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return attention's out and the indexer's loss of each token."""
        mask = torch.zeros(TOKENS, TOKENS + 1, dtype=torch.bool)
        mask.scatter_(1, indices[:, 0].long() % (TOKENS + 1), True)  # -1 becomes a column that is dropped
        mask = mask[:, :-1]
        if lengths is not None:
            mask &= torch.arange(TOKENS) < lengths[:, None]
        logits = torch.einsum("thd,sd->ths", tokens.q, tokens.kv) * SCALE
        probs = logits.masked_fill(~mask[:, None], -torch.inf).softmax(dim=-1)
        scores = torch.einsum("th,ths->ts", tokens.index_weights, torch.einsum("thd,sd->ths", tokens.index_q, tokens.index_k).relu())
        targets = (probs.sum(dim=1) / HEADS).detach()
        surprise = targets.clamp(min=1e-300).log() - scores.masked_fill(~mask, -torch.inf).log_softmax(dim=-1)
        return probs @ tokens.kv[:, :LATENT], torch.where(mask, targets * surprise.masked_fill(~mask, 0.0), 0.0).sum(dim=-1)


@dataclass(frozen=True)
class Data:
    """Tokens and what the task wants of them, [T, hidden size]."""

    hidden: Tensor
    target: Tensor

    @staticmethod
    def draw() -> Data:
        """Draw both in fp32."""
        draw = torch.Generator().manual_seed(0)
        return Data(*(torch.randn(TOKENS, HIDDEN, generator=draw) for _ in range(2)))

    def to(self, where: str | torch.dtype) -> Data:
        """Return them on a device or in a dtype."""
        return Data(self.hidden.to(where), self.target.to(where))


def train(model: Kernels | Eager, data: Data, learns: bool) -> tuple[list[tuple[float, float]], list[Tensor]]:
    """Return (loss of the task, loss of the indexer) of each step, and the chosen keys of the sparse ones.

    learns: whether attention does, too, in the sparse phase.
    """
    hidden = data.hidden
    parameters = {name: weight.to(hidden) for name, weight in draw_weights().items()}
    learning = [weight.requires_grad_() for name, weight in parameters.items() if learns or name.startswith("index")]
    optimizer = torch.optim.Adam(learning, lr=LEARNING_RATE)
    every = torch.arange(TOKENS, dtype=torch.int32, device=hidden.device).expand(TOKENS, 1, TOKENS)
    causal = torch.arange(1, TOKENS + 1, dtype=torch.int32, device=hidden.device)
    losses, choices = [], []
    for step in range(WARM_UP + SPARSE):
        is_sparse = step >= WARM_UP
        tokens = Projected.of(hidden, parameters)
        if is_sparse:
            choices.append(model.choose(tokens, causal))
            out, divergence = model.forward(tokens, choices[-1], None)
        else:
            out, divergence = model.forward(tokens, every, causal)
        task = (out.to(hidden.dtype).flatten(1) @ parameters["out"].T - data.target).square().mean()
        loss = divergence.sum() + (task if is_sparse and learns else 0.0)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append((task.item(), divergence.mean().item()))
    return losses, choices


def main(arch: str = "sm90") -> None:
    """Train by the kernels and in fp64 torch, and compare the losses."""
    gpu = GPUS.get(torch.cuda.get_device_capability()) if torch.cuda.is_available() else None
    learns = (gpu or arch) in WITH_BACKWARD
    with nullcontext() if gpu else cute_mla.simulate(arch, sm_count=4) as simulated:
        losses, choices = train(Kernels(), Data.draw().to("cuda" if gpu else "cpu"), learns)
    if simulated is not None:
        print(f"simulated {arch} with {simulated.sm_count} SMs: {simulated.launches} launches in {simulated.seconds:.1f} s")
    expected, _ = train(Eager(iter(choice.cpu() for choice in choices)), Data.draw().to(torch.float64), learns)
    for step, ((task, divergence), (right_task, right)) in enumerate(zip(losses, expected, strict=True)):
        phase = "sparse " if step >= WARM_UP else "warm-up"
        print(f"{phase} step {step}: task {task:.4f} ({right_task:.4f} in fp64), indexer {divergence:.4f} ({right:.4f})")
    apart = max(abs(mine - right) / right for pair in zip(losses, expected, strict=True) for mine, right in zip(*pair, strict=True))
    falls = losses[WARM_UP - 1][1] < losses[0][1] and (not learns or losses[-1][0] < losses[WARM_UP][0])
    if apart > 0.02 or not falls:
        raise SystemExit(f"losses are {apart:.1%} apart, or do not fall as they should")


if __name__ == "__main__":
    main(*sys.argv[1:])
