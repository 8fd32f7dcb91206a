"""Loading of a Hugging Face kernel's build as the package `kernels` does it, and one call of it. Imports nothing of cute_mla."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch


def load(build: Path) -> ModuleType:
    """Import __init__.py of a build under the id of its metadata."""
    name = json.loads((build / "metadata.json").read_text())["id"]
    spec = importlib.util.spec_from_file_location(name, build / "__init__.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def decode(kernel: Any, arch: str) -> tuple[torch.Tensor, list[Any]]:
    """Decode two requests on the simulated device: out [2, 1, 4, 512] in bf16, and the findings.

    Raises AssertionError unless out agrees with attention in fp32.
    """
    draw = torch.Generator().manual_seed(4)
    q = torch.randn(2, 1, 4, 576, generator=draw).bfloat16()
    cache = torch.randn(3, 64, 1, 576, generator=draw).bfloat16()
    table, lengths = torch.tensor([[2, 0], [1, 1]], dtype=torch.int32), torch.tensor([70, 9], dtype=torch.int32)
    with kernel.simulate(arch, 2) as device:
        plan = kernel.get_mla_metadata(lengths, 4, 1, 4)
        out, _ = kernel.flash_mla_with_kvcache(q, cache, table, lengths, 512, *plan, causal=True)
    for request, length in enumerate(lengths.tolist()):
        keys = cache[table[request].long(), :, 0].flatten(0, 1)[:length].float()
        shares = torch.softmax(q[request, 0].float() @ keys.T * 576**-0.5, dim=-1)
        torch.testing.assert_close(out[request, 0].float(), shares @ keys[:, :512], rtol=0, atol=0.02)
    return out, device.findings
