"""Fit an attention layer to the outputs of another one: 10 steps of Adam on fp32 weights, which each step rounds to bf16.

Runs on a Hopper GPU if there is one, else on the simulated device. The same steps in fp32 torch say how the loss should fall. Run after
`cute-mla build` (or `make build`):  python examples/train_layer.py [sm90|sm100|sm120]
The argument is the architecture of the simulated device.
"""

from __future__ import annotations

import sys
from contextlib import nullcontext

import torch
from torch import Tensor
from torch.func import functional_call

import cute_mla
from cute_mla.layer import MlaAttention, MlaConfig, MlaWeights, plan_sequences

GPUS = {(9, 0): "sm90", (10, 0): "sm100", (10, 3): "sm100"}  # architectures of kernels by compute capability
HIDDEN, HEADS = 64, 2
LENGTHS = [19, 1, 12]  # tokens of the sequences in a batch
STEPS, LEARNING_RATE = 10, 0.002

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


def random_layer(seed: int) -> MlaAttention:
    """Draw a layer in fp32 on the CPU."""
    draw = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=draw) * columns**-0.5

    weights = MlaWeights(
        q_a=None,
        q_a_norm=None,
        q_b=matrix(HEADS * 192, HIDDEN),
        kv_a=matrix(576, HIDDEN),
        kv_a_norm=torch.ones(512),
        kv_b=matrix(HEADS * 256, 512),
        o=matrix(HIDDEN, HEADS * 128),
    )
    return MlaAttention(CONFIG, weights)


def fit(hidden: Tensor, target: Tensor, dtype: torch.dtype) -> list[float]:
    """Return the loss of each step. dtype: of what the layer computes; the weights that Adam updates are fp32."""
    layer = random_layer(seed=1).to(hidden.device)
    batch = plan_sequences(LENGTHS, hidden.device)
    optimizer = torch.optim.Adam(layer.requires_grad_().parameters(), lr=LEARNING_RATE)
    losses = []
    for _ in range(STEPS):
        rounded = {name: weight.to(dtype) for name, weight in layer.named_parameters()}
        out = functional_call(layer, rounded, (hidden.to(dtype), None, batch))  # no cache: whole sequences
        loss = (out.float() - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main(arch: str = "sm90") -> None:
    """Train by the kernels and in fp32 torch, and compare the losses."""
    gpu = GPUS.get(torch.cuda.get_device_capability()) if torch.cuda.is_available() else None
    arch = gpu or arch
    hidden = torch.randn(sum(LENGTHS), HIDDEN, generator=torch.Generator().manual_seed(0))
    target = random_layer(seed=2)(hidden, None, plan_sequences(LENGTHS, "cpu"))
    expected = fit(hidden, target, torch.float32)  # CPU tensors outside simulate(): torch

    device = "cuda" if gpu else "cpu"
    # Two SMs are enough for three sequences and simulate faster than a whole GPU.
    with nullcontext() if gpu else cute_mla.simulate(arch, sm_count=2) as simulated:
        losses = fit(hidden.to(device), target.to(device), torch.bfloat16)

    if simulated is not None:
        print(f"simulated {arch} with {simulated.sm_count} SMs: {simulated.launches} launches in {simulated.seconds:.1f} s")
    for step, pair in enumerate(zip(losses, expected, strict=True)):
        print("step {:2}: loss {:.4f}, of fp32 torch {:.4f}".format(step, *pair))
    if losses[-1] > losses[0] / 2 or any(abs(loss - right) > 0.02 * right for loss, right in zip(losses, expected, strict=True)):
        raise SystemExit("the loss does not fall as it should")


if __name__ == "__main__":
    main(*sys.argv[1:])
