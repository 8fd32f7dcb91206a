"""Batch invariance of the kernels that move keys: a key's bytes are its own, whatever is written or gathered beside it.

The indexer's keys and queries likewise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

import cute_mla
from cute_mla.cache import empty_cache, gather_kv_cache, insert_kv_cache, write_kv_cache
from cute_mla.indexer import prepare_index_queries, write_index_cache
from cute_mla.spec.cache_format import FP8_584
from cute_mla.spec.cache_insert import closed_variants as insert_variants
from cute_mla.spec.cache_insert import normalised_columns, rotates
from cute_mla.spec.cache_rows import FP8_576, CacheRowsConfig, closed_variants, latent_columns, rotary_columns
from cute_mla.spec.index_write import IndexWriteConfig
from cute_mla.spec.index_write import closed_variants as index_variants
from cute_mla.testing.cases.base import DTYPES
from cute_mla.testing.cases.dense_decode import UNUSED_TABLE_ENTRY
from cute_mla.testing.cases.tensors import normal_values
from tests.ops.batch_invariance.contracts import Call, ConfigCase, Contract, Picks, elsewhere, in_order, own_rows, widened
from tests.support.bench import Bench, Result

PAGE_SIZE, PAGES = 32, 3
LENGTHS = (9, 0, 40, 1, 5)
Case = ConfigCase[CacheRowsConfig]


def new_cache(case: Case, page_size: int, pages: int = PAGES) -> Tensor:
    """Return all bytes 0xFF."""
    if not case.config.format.quantised or case.config.format is FP8_576:
        dtype = torch.float8_e4m3fn if case.config.format is FP8_576 else _dtype(case)
        return torch.full((pages, page_size, 1, case.config.format.d_qk * dtype.itemsize), 0xFF, dtype=torch.uint8).view(dtype)
    return empty_cache(case.config.cache, pages, page_size, fill=0xFF)


def _dtype(case: Case) -> torch.dtype:
    return DTYPES.get(case.config.dtype, torch.bfloat16)


def key_bytes(case: Case, cache: Tensor, slot: int) -> Tensor:
    """uint8 [bytes of a key]."""
    page, row = divmod(slot, cache.shape[1])
    if case.config.format.scales_inside:
        return cache.view(torch.uint8)[page, row].flatten()
    of_page, rows, scales = cache[page].flatten(), FP8_584.row_bytes, FP8_584.scale_bytes
    first = cache.shape[1] * rows + row * scales
    padding = torch.zeros(scales - FP8_584.groups, dtype=torch.uint8)  # of the byte behind the scales nothing is said
    return torch.cat([of_page[row * rows : (row + 1) * rows], of_page[first : first + FP8_584.groups], padding])


def named(case: Case) -> str | None:
    """kv_format."""
    return None if rotary_columns(case.config.format) else case.config.cache


def rotary_of(k_pe: Tensor) -> Tensor | None:
    """k_pe, None for no columns."""
    return k_pe if k_pe.shape[1] else None


def scale_of(case: Case) -> Tensor | None:
    """descale_k."""
    return torch.tensor([0.0137]) if case.config.format is FP8_576 else None


# ---------------------------------------------------------------- cache_write


@dataclass(frozen=True)
class Written:
    """New keys and their slots in pages of so many."""

    kv_c: Tensor
    k_pe: Tensor
    slots: Tensor
    page_size: int = PAGE_SIZE


def _write_make(case: Case) -> Written:
    """Return keys of very different sizes."""
    sizes = torch.tensor([1.0, 30.0, 1e-3, 0.0, 4.0])[:, None]
    draw = torch.Generator().manual_seed(7)
    kv_c, k_pe = (
        sizes * normal_values((5, columns), draw) for columns in (latent_columns(case.config.format), rotary_columns(case.config.format))
    )
    return Written(kv_c.to(_dtype(case)), k_pe.to(_dtype(case)), torch.tensor([40, 3, 70, 4, 31]))


def _write_taken(case: Case, operands: Written, picks: Picks, moved: bool) -> Call:
    """Write every key of the call to a slot of its own; moved: in pages of another size, by a mapping of the other type."""
    slots = elsewhere(PAGES * PAGE_SIZE)[int(moved)][: len(picks)]
    keys = operands.kv_c[list(picks)], operands.k_pe[list(picks)]
    return case, Written(*keys, slots.int(), PAGE_SIZE // 2) if moved else replace(operands, kv_c=keys[0], k_pe=keys[1], slots=slots)


def _write(case: Case, operands: Written) -> Result:
    cache = new_cache(case, operands.page_size, PAGES * PAGE_SIZE // operands.page_size)
    write_kv_cache(operands.kv_c, rotary_of(operands.k_pe), cache, operands.slots, descale_k=scale_of(case), kv_format=named(case))
    return (torch.stack([key_bytes(case, cache, slot) for slot in operands.slots.tolist()]),)


# ---------------------------------------------------------------- cache_gather


class Gathered(NamedTuple):
    """A cache, and how many keys are wanted of each of the requests."""

    k_cache: Tensor
    block_table: Tensor
    lengths: tuple[int, ...]


def _gather_make(case: Case) -> Gathered:
    """Written by plain torch."""
    cache = new_cache(case, PAGE_SIZE, 8)
    draw = torch.Generator().manual_seed(8)
    kv_c, k_pe = (
        normal_values((8 * PAGE_SIZE, columns), draw).to(_dtype(case))
        for columns in (latent_columns(case.config.format), rotary_columns(case.config.format))
    )
    write_kv_cache(kv_c, rotary_of(k_pe), cache, torch.arange(8 * PAGE_SIZE), descale_k=scale_of(case), kv_format=named(case))
    return Gathered(cache, torch.tensor([[5, -1], [-1, -1], [2, 7], [0, -1], [3, -1]], dtype=torch.int32), LENGTHS)


def _gather_taken(case: Case, operands: Gathered, picks: Picks, moved: bool) -> Call:
    cache, table = operands.k_cache, operands.block_table[list(picks)]
    if moved:
        order, place = elsewhere(len(cache))
        used = table >= 0
        table = widened(torch.where(used, place[table.clamp(min=0).long()].int(), table), 3, UNUSED_TABLE_ENTRY)
        cache = in_order(cache, order)
    return case, Gathered(cache, table, tuple(operands.lengths[pick] for pick in picks))


def _starts(operands: Gathered) -> list[int]:
    return list(accumulate(operands.lengths, initial=0))


def _gather(case: Case, operands: Gathered) -> Result:
    starts = _starts(operands)
    offsets = torch.tensor(starts, dtype=torch.int32)
    dtype = _dtype(case) if case.config.format.quantised else None
    options: dict[str, Any] = {"descale_k": scale_of(case), "dtype": dtype, "kv_format": named(case)}
    return (gather_kv_cache(operands.k_cache, operands.block_table, offsets, starts[-1], **options),)


def _gather_of(operands: Gathered, results: Result, place: int) -> Result:
    first, end = list(pairwise(_starts(operands)))[place]
    return (results[0][first:end],)


# ---------------------------------------------------------------- cache_insert


@dataclass(frozen=True)
class Inserted:
    """New keys and the queries and positions of their tokens."""

    written: Written
    q_pe: Tensor
    positions: Tensor


def _insert_make(case: Case) -> Inserted:
    """Return keys of very different sizes, and queries."""
    q_pe = normal_values((5, 3, 64), torch.Generator().manual_seed(8)).to(_dtype(case))
    return Inserted(_write_make(case), q_pe, torch.tensor([3, 0, 7, 7, 1]))


def _insert_taken(case: Case, operands: Inserted, picks: Picks, moved: bool) -> Call:
    """Take tokens of a call, as keys are taken; moved: by positions of the other type."""
    _, written = _write_taken(case, operands.written, picks, moved)
    positions = operands.positions[list(picks)]
    return case, Inserted(written, operands.q_pe[list(picks)], positions.int() if moved else positions)


def _insert(case: Case, operands: Inserted) -> Result:
    written, layout = operands.written, case.config.format
    cache = new_cache(case, written.page_size, PAGES * PAGE_SIZE // written.page_size)
    draw, dtype = torch.Generator().manual_seed(9), _dtype(case)
    weight, table = torch.randn(normalised_columns(layout), generator=draw).to(dtype), torch.randn(8, 64, generator=draw)
    keys, q_pe = torch.empty(len(written.slots), layout.d_qk, dtype=dtype), operands.q_pe.clone()
    rotary = (q_pe, table, operands.positions) if rotates(layout) else (None, None, None)
    insert_kv_cache(
        *(written.kv_c, rotary_of(written.k_pe), rotary[0], cache, written.slots, weight, *rotary[1:]),
        keys=keys,
        descale_k=scale_of(case),
        kv_format=named(case),
    )
    return torch.stack([key_bytes(case, cache, slot) for slot in written.slots.tolist()]), q_pe, keys


# ---------------------------------------------------------------- index_write


class IndexRows(NamedTuple):
    """Rows of tokens, the tokens' positions, and the slots of keys in pages of so many."""

    rows: Tensor
    positions: Tensor
    slots: Tensor
    page_size: int = 16


def _index_make(case: ConfigCase[IndexWriteConfig]) -> IndexRows:
    """Return rows of very different sizes."""
    sizes = torch.tensor([1.0, 30.0, 1e-3, 0.0, 4.0])[:, None, None]
    rows = sizes * normal_values((5, 3, 128), torch.Generator().manual_seed(7))
    return IndexRows(rows.bfloat16(), torch.tensor([3, 0, 7, 7, 1]), torch.tensor([40, 3, 70, 4, 31]))


def _index_taken(case: ConfigCase[IndexWriteConfig], operands: IndexRows, picks: Picks, moved: bool) -> Call:
    """Take tokens of a call. moved: at slots elsewhere, in pages of another size, by positions of the other type."""
    picked = list(picks)
    slots = elsewhere(PAGES * PAGE_SIZE)[int(moved)][: len(picked)]
    taken = IndexRows(operands.rows[picked], operands.positions[picked], slots)
    return case, taken._replace(positions=taken.positions.int(), page_size=PAGE_SIZE) if moved else taken


def _index(case: ConfigCase[IndexWriteConfig], operands: IndexRows) -> Result:
    draw = torch.Generator().manual_seed(9)
    table, norm = torch.randn(8, 64, generator=draw), torch.randn(2, 128, generator=draw)
    if case.config.rows == "queries":
        weights = torch.ones(operands.rows.shape[:2])
        out, scaled = prepare_index_queries(operands.rows, weights, table, operands.positions, rope="half_split", hadamard=True)
        return out.view(torch.uint8), scaled
    cache = torch.zeros(PAGES * PAGE_SIZE // operands.page_size, operands.page_size, 1, 132, dtype=torch.uint8)
    write_index_cache(operands.rows[:, 0], cache, operands.slots, norm[0], norm[1], table, operands.positions, rope="interleaved")
    codes, scales = cache.flatten(1).split((operands.page_size * 128, operands.page_size * 4), dim=1)
    return (torch.cat((codes.reshape(-1, 128), scales.reshape(-1, 4)), dim=1)[operands.slots],)


def moving(
    configs: Iterable[Any], taken: Callable[..., Call], of: Callable[..., Result], make: Any, body: Callable[..., Result]
) -> Contract:
    """Return a contract of calls whose body plain torch, outside of the device, runs to the same bytes."""

    def run(bench: Bench, case: Any, operands: Any) -> Result:
        with cute_mla.simulate(bench.arch, case.sm_count):
            return body(case, operands)

    def expect(case: Any, operands: Any, results: Result) -> None:
        assert all(map(torch.equal, results, body(case, operands)))

    return Contract(tuple(map(ConfigCase, configs)), taken, of, make=make, run=run, expect=expect)


MOVING: dict[str, Contract] = {
    "cache_insert": moving(insert_variants(), _insert_taken, own_rows, _insert_make, _insert),
    "index_write": moving(index_variants(), _index_taken, own_rows, _index_make, _index),
    "cache_write": moving(closed_variants(), _write_taken, own_rows, _write_make, _write),
    "cache_gather": moving(closed_variants(), _gather_taken, _gather_of, _gather_make, _gather),
}
