"""The drop-in module under torch.compile: one graph, the same bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import cute_mla
from cute_mla import flash_mla
from cute_mla.flash_mla import form_a
from tests.support.compiling import compiled, fresh

assert fresh


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape))).to(torch.bfloat16)


def two_layers(q: Tensor, k_cache: Tensor, table: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    schedule, none = flash_mla.get_mla_metadata(lengths, q.shape[2], 1)
    first, lse = flash_mla.flash_mla_with_kvcache(q, k_cache, table, lengths, 512, schedule, none, None, True, False)
    second, _ = flash_mla.flash_mla_with_kvcache(q, k_cache, table, lengths, 512, schedule, none, None, True, False)
    return first + second, lse


def to_base_2(q: Tensor, kv: Tensor, indices: Tensor) -> tuple[Tensor, ...]:
    return form_a.flash_mla_sparse_fwd(q, kv, indices, 0.125)


def packed(q: Tensor, k: Tensor, v: Tensor, ends: Tensor) -> tuple[Tensor, Tensor]:
    return flash_mla.flash_attn_varlen_func(q, k, v, ends, ends, 5, 5, causal=True, is_varlen=True)


CALLS: list[tuple[Callable[..., Any], tuple[Tensor, ...]]] = [
    (two_layers, (drawn(2, 1, 3, 576), drawn(3, 64, 1, 576), torch.tensor([[2], [0]]).int(), torch.tensor([5, 64]).int())),
    (to_base_2, (drawn(2, 3, 576), drawn(7, 1, 576), torch.tensor([[[0, 3, -1]], [[6, 7, 1]]]).int())),
    (packed, (drawn(9, 3, 192), drawn(9, 3, 192), drawn(9, 3, 128), torch.tensor([0, 4, 9]).int())),
]


@pytest.mark.parametrize(("function", "arguments"), CALLS, ids=[function.__name__ for function, _ in CALLS])
def test_a_call_is_one_graph(function: Callable[..., Any], arguments: tuple[Tensor, ...]) -> None:
    call, counter = compiled(function)
    with cute_mla.simulate("sm90", 2):
        results, expected = call(*arguments), function(*arguments)
    assert all(torch.equal(result, other) and result.stride() == other.stride() for result, other in zip(results, expected, strict=True))
    assert counter.frame_count == 1
