"""Orders: each variant has the one of the golden file, and calls of equal orders give a request equal bits."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest
import torch
from torch import Tensor

import cute_mla
import cute_mla.reference
from cute_mla import row_digest
from cute_mla.cache import quantise_cache
from cute_mla.indexer import attention_head_sums, fp8_mqa_logits, fp8_paged_mqa_logits, indexer_backward, indexer_scores, topk_indices
from cute_mla.spec import sparse_prefill_dq
from cute_mla.spec.arch import ARCHS, Arch
from cute_mla.spec.orders import TERMS, orders

GOLDEN = Path(__file__).parent / "orders.txt"  # a line a variant. One that changes is a note in CHANGELOG.md: bits have changed
KEYS, HEADS, SOME = 150, 65, 5  # SOME heads are compared; calls have them and more
ALONE, AMONG = (1,), (2, 1, 0)  # requests of a call; request 1 is compared

Run = Callable[[int, tuple[int, ...]], tuple[Tensor, ...]]  # heads and requests of a call to the results of the compared rows


def drawn(*shape: int, seed: int = 0) -> Tensor:
    """Return normal numbers in bf16."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def dense_decode(heads: int, picks: tuple[int, ...]) -> tuple[Tensor, ...]:
    q, cache = drawn(3, 1, HEADS, 576)[list(picks), :, :heads], drawn(9, 64, 1, 576, seed=1)
    table = torch.arange(9, dtype=torch.int32).view(3, 3)[list(picks)]
    lengths = torch.tensor([70, KEYS, 3], dtype=torch.int32)[list(picks)]
    out, lse = cute_mla.flash_mla_with_kvcache(q, cache, table, lengths, 512, *cute_mla.get_mla_metadata(), batch_invariant=True)
    return out[picks.index(1), 0, :SOME], lse[picks.index(1), :SOME]


def sparse_decode(heads: int, picks: tuple[int, ...]) -> tuple[Tensor, ...]:
    q, cache = drawn(3, 1, HEADS, 576)[list(picks), :, :heads], quantise_cache(drawn(9, 64, 1, 576, seed=1), "fp8_656")
    indices = torch.randperm(9 * 64, generator=torch.Generator().manual_seed(2))[: 3 * KEYS].int().view(3, 1, KEYS)[list(picks)]
    out, lse = cute_mla.flash_mla_with_kvcache(
        *(q, cache, None, None, 512, *cute_mla.get_mla_metadata()), indices=indices, is_fp8_kvcache=True, batch_invariant=True
    )
    return out[picks.index(1), 0, :SOME], lse[picks.index(1), :SOME]


def sparse_prefill(heads: int, picks: tuple[int, ...]) -> tuple[Tensor, ...]:
    q, kv = drawn(3, HEADS, 576)[list(picks), :heads], drawn(400, 1, 576, seed=1)
    indices = torch.randperm(400, generator=torch.Generator().manual_seed(2)).int()[: 2 * KEYS].view(2, 1, KEYS)[[0, 1, 0]][list(picks)]
    return tuple(result[picks.index(1), :SOME] for result in cute_mla.flash_mla_sparse_fwd(q, kv, indices, 0.1))


def sparse_gradients(heads: int, picks: tuple[int, ...]) -> tuple[Tensor, ...]:
    """Return dq and dkv of a request with two tokens."""
    q, kv = drawn(3, 2, HEADS, 576)[list(picks), :, :heads], drawn(3, 200, 1, 576, seed=1)[list(picks)]
    indices = torch.rand(3, 2, 200, generator=torch.Generator().manual_seed(2)).argsort()[list(picks), :, None, :KEYS].int()
    out, _, lse = cute_mla.reference.sparse_prefill(q, kv, indices, 0.1)
    dout = drawn(3, 2, HEADS, 512, seed=3)[list(picks), :, :heads]
    dq, dkv, _ = cute_mla.flash_mla_sparse_bwd(
        q, kv, out.bfloat16(), lse, dout, indices, 0.1, max_workspace=1 << 22 if len(picks) > 1 else 0
    )
    return dq[picks.index(1), :, :SOME], dkv[picks.index(1)]


def head_sums(heads: int, picks: tuple[int, ...]) -> tuple[Tensor, ...]:
    q, kv, lse = drawn(3, HEADS, 576)[list(picks), :heads], drawn(400, 1, 576, seed=1), 60 + drawn(3, HEADS, seed=3).float()
    indices = torch.randperm(400, generator=torch.Generator().manual_seed(2)).int()[: 2 * KEYS].view(2, 1, KEYS)[[0, 1, 0]][list(picks)]
    return (attention_head_sums(q, kv, lse[list(picks), :heads], indices, 0.1)[picks.index(1)],)


def scores(heads: int, picks: tuple[int, ...]) -> tuple[Tensor, ...]:
    """Return scores and gradients of a request with two tokens."""
    q, k = drawn(3, 2, 64, 128)[list(picks), :, :heads], drawn(3, 200, 128, seed=1)[list(picks)]
    weights, dscores = (drawn(3, 2, last, seed=3).float()[list(picks)] for last in (heads, KEYS))
    indices = torch.rand(3, 2, 200, generator=torch.Generator().manual_seed(2)).argsort()[list(picks), :, None, :KEYS].int()
    results = (indexer_scores(q, k, weights, indices), *indexer_backward(q, k, weights, indices, dscores))
    return tuple(result[picks.index(1)] for result in results)


def dense_prefill(heads: int, picks: tuple[int, ...]) -> tuple[Tensor, ...]:
    lengths = [[130, KEYS, 3][pick] for pick in picks]
    starts = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    q, k, v = (torch.cat([drawn(length, HEADS, columns, seed=pick) for pick, length in zip(picks, lengths, strict=True)])[:, :2]
               for columns in (192, 192, 128))  # fmt: skip
    results = cute_mla.flash_attn_varlen_func(q, k, v, starts, starts, max(lengths), max(lengths), causal=True)
    return tuple(result[starts[picks.index(1)] :][:KEYS] for result in results)


def logits(heads: int, picks: tuple[int, ...]) -> tuple[Tensor, ...]:
    """Score keys in a row of a request alone, in pages of all."""
    q, keys = drawn(3, 1, HEADS, 128)[list(picks), :, :heads].to(torch.float8_e4m3fn), drawn(192, 128, seed=1).to(torch.float8_e4m3fn)
    weights, scales = drawn(3, HEADS, seed=2).float()[list(picks), :heads].contiguous(), drawn(192, seed=3).float()
    if picks == ALONE:
        zero = torch.zeros(1, dtype=torch.int32)
        return (fp8_mqa_logits(q[0], (keys, scales), weights, zero, zero + KEYS)[0, :KEYS],)
    values, of_keys = keys.view(torch.uint8).view(3, -1), scales.view(torch.uint8).view(3, -1)
    cache = torch.cat([values, of_keys], 1).view(3, 64, 1, 132)
    table, lengths = torch.arange(3, dtype=torch.int32).expand(3, 3).contiguous(), torch.full((3,), KEYS, dtype=torch.int32)
    return (fp8_paged_mqa_logits(q, cache, weights, lengths, table, None, 192)[picks.index(1), :KEYS],)


def chosen(heads: int, picks: tuple[int, ...]) -> tuple[Tensor, ...]:
    rows = drawn(3, 3000).float()[list(picks)]
    return (topk_indices(rows, torch.full((len(picks),), 3000, dtype=torch.int32), 100)[picks.index(1)],)


# Heads of the calls: those of one CTA or two, of few or many
CASES: tuple[tuple[Run, tuple[int, ...]], ...] = (
    (dense_decode, (5, 65)),
    (sparse_decode, (5, 17, 65)),
    (sparse_prefill, (5, 65)),
    (sparse_gradients, (5, 65)),
    (head_sums, (65,)),
    (scores, (64,)),
    (dense_prefill, (2,)),
    (logits, (20, 64)),
    (chosen, (1,)),
)


def test_orders_are_those_of_the_golden_file() -> None:
    """Orders of calls whose requests are cut, where they are others, stand behind those of a variant."""
    found = [
        " ".join((op, arch.name, name, *dict.fromkeys((order, orders(op, arch, cut=True)[name]))))
        for op in TERMS
        for arch in ARCHS.values()
        for name, order in orders(op, arch).items()
    ]
    assert found == GOLDEN.read_text().splitlines(), "\n".join(found)


@pytest.mark.in_turn
@pytest.mark.parametrize(("run", "heads"), CASES)
def test_equal_orders_mean_equal_bits(arch: Arch, run: Run, heads: tuple[int, ...]) -> None:
    """Each number of heads in a call of one request and of three, on other numbers of SMs. The order of a call is that of its launches."""
    if run is sparse_gradients and not sparse_prefill_dq.closed_variants(arch):
        pytest.skip(f"no kernels of the backward of sparse prefill on {arch.name}")
    seen: dict[tuple[str | None, ...], set[tuple[int, ...]]] = {}
    for place, (count, picks) in enumerate(product(heads, (ALONE, AMONG))):
        with cute_mla.simulate(arch, 2 + 3 * place), cute_mla.record() as calls:
            digests = torch.cat([row_digest(result) for result in run(count, picks)])
        seen.setdefault(tuple(dict.fromkeys(call.order for call in calls)), set()).add(tuple(digests.tolist()))
    assert not any(None in order for order in seen)
    assert [len(found) for found in seen.values()] == [1] * len(seen), seen
