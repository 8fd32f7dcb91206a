"""Operands of small calls of the indexer's logits, and the same keys in a row and in an index cache."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

import cute_mla
from cute_mla import reference
from cute_mla.indexer import fp8_mqa_logits, fp8_paged_mqa_logits
from cute_mla.spec.arch import Arch
from cute_mla.spec.mqa_logits import COLUMNS, ROW_BYTES

NAN_BYTE = 0xFF  # of e4m3; four of them are an fp32 NaN
E4M3_MAX = 448.0


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


class Values(NamedTuple):
    """Queries e4m3 [tokens, heads, 128], keys e4m3 [keys, 128], scales fp32 [keys], weights fp32 [tokens, heads]."""

    q: Tensor
    keys: Tensor
    scales: Tensor
    weights: Tensor


def exact(tokens: int, heads: int, keys: int, seed: int = 0) -> Values:
    """Return values whose sums fp32 holds in any order."""
    draw = generator(seed)
    q, k = (torch.randint(-4, 5, (*shape, COLUMNS), generator=draw) * 0.5 for shape in ((tokens, heads), (keys,)))
    scales = 2.0 ** torch.randint(-3, 4, (keys,), generator=draw)
    weights = torch.randint(-2, 3, (tokens, heads), generator=draw).float()
    return Values(q.to(torch.float8_e4m3fn), k.to(torch.float8_e4m3fn), scales, weights)


def normal(tokens: int, heads: int, keys: int, seed: int = 0) -> Values:
    """Return normal values, quantised as DeepGEMM's tests do: scales of amax / 448, which are no powers of two."""
    draw = generator(seed)
    k = torch.randn(keys, COLUMNS, generator=draw)
    scales = k.abs().amax(1) / E4M3_MAX
    q = torch.randn(tokens, heads, COLUMNS, generator=draw).to(torch.float8_e4m3fn)
    return Values(q, (k / scales[:, None]).to(torch.float8_e4m3fn), scales, torch.randn(tokens, heads, generator=draw))


def row_logits(values: Values, ks: Tensor, ke: Tensor, **options: Any) -> Tensor:
    """Call fp8_mqa_logits."""
    return fp8_mqa_logits(values.q, (values.keys, values.scales), values.weights, ks, ke, **options)


def expected_rows(values: Values, ks: Tensor, ke: Tensor, **options: Any) -> Tensor:
    """Return the reference's logits."""
    return reference.fp8_mqa_logits(values.q, (values.keys, values.scales), values.weights, ks, ke, **options)


def cache_of(keys: Tensor, scales: Tensor, page_size: int, used: list[int], pages: int) -> Tensor:
    """Return an index cache whose pages `used` hold the keys in their order; all other bytes are NaN.

    Written byte by byte from the layout: values of a page's keys, then their scales.
    """
    cache = torch.full((pages, page_size * ROW_BYTES), NAN_BYTE, dtype=torch.uint8)
    codes, scale_bytes = keys.view(torch.uint8), scales.view(torch.uint8).view(-1, 4)
    for position in range(len(keys)):
        page, row = used[position // page_size], position % page_size
        cache[page, row * COLUMNS : (row + 1) * COLUMNS] = codes[position]
        at = page_size * COLUMNS + 4 * row
        cache[page, at : at + 4] = scale_bytes[position]
    return cache.view(pages, page_size, 1, ROW_BYTES)


class PagedCall(NamedTuple):
    """Operands of fp8_paged_mqa_logits."""

    q: Tensor
    cache: Tensor
    weights: Tensor
    context_lens: Tensor
    block_table: Tensor
    max_context_len: int

    def logits(self, metadata: Tensor | None = None, **options: Any) -> Tensor:
        """Call fp8_paged_mqa_logits."""
        q, cache, weights, lens, table, most = self
        return fp8_paged_mqa_logits(q, cache, weights, lens, table, metadata, most, **options)

    def expected(self, **options: Any) -> Tensor:
        """Return the reference's logits."""
        return reference.fp8_paged_mqa_logits(*self, **options)

    def request(self, index: int) -> PagedCall:
        """Return the call of one request alone."""
        tokens = self.q.shape[1]
        one = slice(index, index + 1)
        weights = self.weights[index * tokens : (index + 1) * tokens]
        return self._replace(q=self.q[one], weights=weights, context_lens=self.context_lens[one], block_table=self.block_table[one])


def paged(lengths: list[int], tokens: int, heads: int, page_size: int = 64, *, spread: Any = exact, seed: int = 0) -> PagedCall:
    """Return a call of requests with these lengths, which share no page; entries behind a length name no page. Page 0 is unused."""
    most = max([*lengths, 1])
    width = -(-most // page_size)
    counts = [-(-max(length, 0) // page_size) for length in lengths]
    order = (torch.randperm(sum(counts), generator=generator(seed)) + 1).tolist()
    table = torch.full((len(lengths), width), 2_147_480_000, dtype=torch.int32)
    cache = torch.full((sum(counts) + 2, page_size, 1, ROW_BYTES), NAN_BYTE, dtype=torch.uint8)
    values = spread(len(lengths) * tokens, heads, sum(max(length, 0) for length in lengths), seed)
    first = 0
    for request, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        own, order = order[:count], order[count:]
        keys = slice(first, first + max(length, 0))
        table[request, :count] = torch.tensor(own, dtype=torch.int32)
        cache[own] = cache_of(values.keys[keys], values.scales[keys], page_size, list(range(count)), count)
        first = keys.stop
    q = values.q.view(len(lengths), tokens, heads, COLUMNS)
    return PagedCall(q, cache, values.weights, ints(*lengths), table, most)


def simulated(arch: Arch, call: Any, sm_count: int | None = None, **options: Any) -> Tensor:
    """Return what call() does on the simulated device, by one kernel and nothing else."""
    with cute_mla.simulate(arch.name, sm_count, **options) as device:
        logits: Tensor = call()
        assert device.launches == 1
    return logits


def equal(found: Tensor, expected: Tensor) -> bool:
    """Return whether all bits of numbers agree, NaN and NaN too; -0 is 0."""
    return found.shape == expected.shape and bool(((found == expected) | (found.isnan() & expected.isnan())).all())
