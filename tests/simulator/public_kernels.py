"""FlashAttention-4's forward pass for Hopper on the simulated device, where the package is installed.

    python -m tests.simulator.public_kernels [--code ptx|sass] [--schedule lazy]

It is called as its users call it, on CPU tensors, with torch's questions about a GPU answered for it. Prints the error against torch and
the findings, or what is missing, which `pip install --no-deps flash-attn-4 quack-kernels` brings.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, patch

import torch
from torch.overrides import TorchFunctionMode

from cute_mla.simulator import cute_dsl

ARCH, CAPABILITY = "sm_90a", (9, 0)
TRITON = ("triton", "triton.language", "triton.testing", "triton.runtime")  # which the library imports for other kernels


class OnGpu(TorchFunctionMode):
    """CPU tensors say that they are on a GPU."""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        """Answer is_cuda, and leave everything else as it is."""
        return True if getattr(func, "__self__", None) is torch.Tensor.is_cuda else func(*args, **(kwargs or {}))


@contextmanager
def answered_for() -> Iterator[None]:
    """Answer torch's questions about a GPU, which has four multiprocessors."""
    major, minor = CAPABILITY
    properties = SimpleNamespace(name=ARCH, major=major, minor=minor, multi_processor_count=4, total_memory=1 << 36, L2_cache_size=1 << 25)
    answers: dict[str, Callable[..., Any]] = {
        "is_available": lambda: True,
        "current_device": lambda: 0,
        "get_device_capability": lambda *device: CAPABILITY,
        "get_device_properties": lambda *device: properties,
        "current_stream": lambda *device: SimpleNamespace(cuda_stream=0),
    }
    for name in ("torch._dynamo", "torch._inductor.runtime.hints"):
        import_module(name)  # which look for triton themselves
    with ExitStack() as stack:
        for name, answer in answers.items():
            stack.enter_context(patch.object(torch.cuda, name, answer))
        stack.enter_context(patch.dict(sys.modules, {name: MagicMock() for name in TRITON if name not in sys.modules}))
        yield


def attention() -> float:
    """Call the causal forward pass. Return the greatest error of its output."""
    forward = import_module("flash_attn.cute.interface")._flash_attn_fwd
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 128, 2, 128).bfloat16() for _ in range(3))
    out = forward(q, k, v, causal=True, return_lse=True)[0]
    by_head = (tensor.float().transpose(1, 2) for tensor in (q, k, v))
    expected = torch.nn.functional.scaled_dot_product_attention(next(by_head), next(by_head), next(by_head), is_causal=True)
    return float((out.float() - expected.transpose(1, 2)).abs().max())


def run(schedule: str, code: str) -> str:
    """Run the call and return what came of it."""
    try:
        with answered_for(), cute_dsl.simulate(ARCH, schedule, on_finding="collect", code=code) as device, OnGpu():
            error = attention()
    except ModuleNotFoundError as missing:
        return f"left out, {missing.name} is not installed"
    instructions = sum(launch.report.instructions for launch in device.launches)
    kinds = sorted({finding.kind for finding in device.findings})
    return f"error {error:.1e}, {instructions:,} warp instructions, findings: {', '.join(kinds) or 'none'}"


def main() -> None:
    """Run the call and print a line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--code", choices=("ptx", "sass"), default="sass")
    parser.add_argument("--schedule", default="lazy")
    options = parser.parse_args()
    print(f"FlashAttention-4 {ARCH}: {run(options.schedule, options.code)}")


if __name__ == "__main__":
    main()
