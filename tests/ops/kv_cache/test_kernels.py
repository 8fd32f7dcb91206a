"""cache_write and cache_gather on the simulated device of every architecture: the smoke cases, under every schedule."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import cute_mla
from cute_mla.cache import gather_kv_cache, write_kv_cache
from cute_mla.spec.arch import Arch
from cute_mla.spec.cache_rows import CACHED, key_types
from cute_mla.testing.cases.base import DTYPES
from cute_mla.testing.cases.paged_cache import copy_cache
from cute_mla.testing.operations.cache_write.case import CacheWriteCase, make_cache_write_tensors


def test_the_torch_path_is_the_same(arch: Arch) -> None:
    """Outside simulate() plain torch writes the same bytes and gathers the same numbers, zeros of a page that the cache does not have."""
    for cache in CACHED:
        dtype = key_types(CACHED[cache])[-1]
        case = CacheWriteCase(dtype, cache=cache, tokens=40, values="normal", scale_of_cache=0.3 if cache == "fp8_576" else None)
        tensors = make_cache_write_tensors(case)
        paged = [copy_cache(case, tensors.k_cache) for _ in range(2)]
        table, ends = torch.tensor([[3, 1, 9]], dtype=torch.int32), torch.tensor([0, 140], dtype=torch.int32)
        gathered: list[torch.Tensor] = []
        named: dict[str, Any] = {"descale_k": tensors.descale_k, "kv_format": case.kv_format}
        for kernels, target in zip((True, False), paged, strict=True):
            operands = (tensors.kv_c, tensors.k_pe, target, tensors.slot_mapping)
            if kernels:
                with cute_mla.simulate(arch.name, on_finding="collect") as device:
                    write_kv_cache(*operands, **named)
                    gathered.append(gather_kv_cache(target, table, ends, 140, **named, dtype=DTYPES[dtype]))
                assert [finding.kind for finding in device.findings] == ["block_table"]
            else:
                write_kv_cache(*operands, **named)
                gathered.append(gather_kv_cache(target, table, ends, 140, **named, dtype=DTYPES[dtype]))
        assert torch.equal(paged[0].view(torch.uint8), paged[1].view(torch.uint8))
        assert torch.equal(gathered[0].isnan(), gathered[1].isnan())
        assert torch.equal(gathered[0].nan_to_num(7.0), gathered[1].nan_to_num(7.0))


@pytest.mark.parametrize("entry", [4, -1, -(2**31), 2**31 - 1])
def test_a_used_table_entry_outside_the_cache_is_a_page_of_zeros(entry: int, arch: Arch) -> None:
    cache = torch.randn(4, 16, 1, 576).bfloat16()
    table, ends = torch.tensor([[2, 3, entry], [entry, entry, 1]], dtype=torch.int32), torch.tensor([0, 30, 31], dtype=torch.int32)
    with cute_mla.simulate(arch.name, on_finding="collect") as device:
        gather_kv_cache(cache, table, ends, 31, starts=torch.tensor([0, 32], dtype=torch.int32))
        assert device.findings == [], "no request uses such an entry"
        out = gather_kv_cache(cache, table, ends, 31, starts=torch.tensor([0, 31], dtype=torch.int32))
        (finding,) = device.findings
    assert finding.kind == "block_table"
    assert finding.message.startswith(f"block_table[1, 1] is {entry} and request 1 uses it; supported: 0 to 3;")
    assert not out[30].any()
    assert torch.equal(out[:30], cache[2:].flatten(0, 2)[:30])
