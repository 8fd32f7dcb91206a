"""cache_write and cache_gather on the simulated device of every architecture: the smoke cases, under every schedule, and broken kernels."""

from __future__ import annotations

from dataclasses import replace
from itertools import cycle
from pathlib import Path

import pytest
import torch

import cute_mla
from cute_mla.cache import gather_kv_cache, write_kv_cache
from cute_mla.spec.arch import ARCHS, Arch
from cute_mla.spec.cache_rows import CACHED, latent_columns
from cute_mla.testing.cases.cache_gather import CacheGatherCase, make_cache_gather_tensors
from cute_mla.testing.cases.cache_write import CacheWriteCase, make_cache_write_tensors
from cute_mla.testing.cases.paged_cache import PagedCacheCase, copy_cache
from cute_mla.testing.runner import schedules
from cute_mla.testing.suites.cache_gather import SMOKE as GATHER_SMOKE
from cute_mla.testing.suites.cache_write import SMOKE as WRITE_SMOKE
from tests.mutation.planted_bugs import Workshop
from tests.support.bench import Bench

SMOKE = pytest.mark.parametrize("case", [*WRITE_SMOKE, *GATHER_SMOKE], ids=lambda case: f"{case.op}-{case.id}")


@SMOKE
def test_smoke(case: PagedCacheCase, bench: Bench) -> None:
    bench.judge(case)


@pytest.mark.slow
@SMOKE
def test_smoke_under_every_schedule(case: PagedCacheCase, bench: Bench) -> None:
    bench.judge(case, *schedules(8, 0))


@pytest.mark.parametrize("cache", CACHED)
def test_a_key_is_the_same_whoever_else_is_written(cache: str, arch: Arch) -> None:
    """Batch invariance: a token alone, and the same among others, in another place."""
    case = CacheWriteCase(cache=cache, tokens=23, values="nasty")
    tensors = make_cache_write_tensors(case)
    token = 13
    alone, among = copy_cache(case, tensors.k_cache), copy_cache(case, tensors.k_cache)
    order = torch.randperm(case.tokens, generator=torch.Generator().manual_seed(1))
    with cute_mla.simulate(arch.name, sm_count=3):
        write_kv_cache(*(operand[[token]] for operand in (tensors.kv_c, tensors.k_pe)), alone, tensors.slot_mapping[[token]])
        write_kv_cache(*(operand[order] for operand in (tensors.kv_c, tensors.k_pe)), among, tensors.slot_mapping[order])
        page, row = divmod(int(tensors.slot_mapping[token]), case.page_size)
        table, ends = torch.tensor([[page]], dtype=torch.int32), torch.tensor([0, 1], dtype=torch.int32)
        first, second = (gather_kv_cache(paged, table, ends, 1, starts=torch.tensor([row]).int()) for paged in (alone, among))
        whole = gather_kv_cache(among, table, torch.tensor([0, 64]).int(), 64)
    assert torch.equal(first.view(torch.int16), second.view(torch.int16))
    assert torch.equal(first[0].view(torch.int16), whole[row].view(torch.int16))
    assert first.shape[1] == latent_columns(CACHED[cache]) + 64


def test_the_torch_path_is_the_same(arch: Arch) -> None:
    """Outside simulate() plain torch writes the same bytes and gathers the same numbers."""
    for cache in CACHED:
        case = CacheWriteCase("fp16", cache=cache, tokens=40, values="normal", scale_of_cache=0.3 if cache == "fp8_576" else None)
        tensors = make_cache_write_tensors(case)
        paged = [copy_cache(case, tensors.k_cache) for _ in range(2)]
        table, ends = torch.tensor([[3, 1, 9]], dtype=torch.int32), torch.tensor([0, 140], dtype=torch.int32)
        gathered = []
        for kernels, target in zip((True, False), paged, strict=True):
            operands = (tensors.kv_c, tensors.k_pe, target, tensors.slot_mapping)
            if kernels:
                with cute_mla.simulate(arch.name):
                    write_kv_cache(*operands, descale_k=tensors.descale_k)
                    gathered.append(gather_kv_cache(target, table, ends, 140, descale_k=tensors.descale_k, dtype=torch.float16))
            else:
                write_kv_cache(*operands, descale_k=tensors.descale_k)
                gathered.append(gather_kv_cache(target, table, ends, 140, descale_k=tensors.descale_k, dtype=torch.float16))
        assert torch.equal(paged[0].view(torch.uint8), paged[1].view(torch.uint8))
        assert torch.equal(gathered[0].isnan(), gathered[1].isnan())
        assert torch.equal(gathered[0].nan_to_num(7.0), gathered[1].nan_to_num(7.0))


# What a kernel looks like in PTX, and what to make of it, with a case that must notice.
NASTY = CacheWriteCase(cache="fp8_656", values="nasty")
PAGES = CacheWriteCase(cache="fp8_584", values="nasty", page_size=16, pages=9)
FLAT = CacheWriteCase(cache="fp8_576", scale_of_cache=0.4)
ROWS = CacheGatherCase(cache="fp8_656", lengths=(30, 0, 40), starts=(5, 0, 17), page_size=16, pages=9)
BROKEN = replace(ROWS, broken=True)
MANY = CacheGatherCase(lengths=(*(0,) * 40, 3, *(0,) * 30, 2), page_size=16)
BUGS: dict[str, tuple[PagedCacheCase, str, str]] = {
    "negative slots are written": (NASTY, r"setp\.lt\.s64\s+(%p\d+), (%rd\d+), 0;", r"setp.lt.s64 \1, \2, -9223372036854775807;"),
    "slots behind the cache are written": (PAGES, r"setp\.ge\.s64\s+(%p\d+), (%rd\d+), (%rd\d+);", r"setp.lt.s64 \1, \2, -5;"),
    "a lane is left out of the largest": (NASTY, r"(shfl\.sync\.bfly\.b32\s+%r\d+, %r\d+), 8,", r"\1, 0,"),
    "half a group": (PAGES, r"(shfl\.sync\.bfly\.b32\s+%r\d+, %r\d+), 4,", r"\1, 0,"),
    "another largest e4m3": (NASTY, r"0f43E00000", "0f43E10000"),
    "no least power of two": (PAGES, r"0f38D1B717", "0f00000000"),
    "an infinity is a number": (NASTY, r"\b213909504[01]\b|\b2139095039\b", "2139095042"),
    "not rounded up to a power of two": (PAGES, r"\b8388607\b", "0"),
    "the scale of the cache is left out": (FLAT, r"div\.rn\.f32(\s+%r\d+, %r\d+), %r\d+;", r"div.rn.f32\1, 0f3F800000;"),
    "columns in pairs the wrong way round": (
        NASTY, r"(cvt\.rn\.satfinite\.e4m3x2\.f32\s+%rs\d+), (%r\d+), (%r\d+);", r"\1, \3, \2;",
    ),
    "a request ends a row late": (ROWS, r"setp\.le\.s32\s+(%p\d+, %r\d+, %r\d+);(\s*vote)", r"setp.lt.s32 \1;\2"),
    "32 requests at most": (MANY, r"setp\.eq\.b32\s+(%p\d+), (%r\d+), -1;", r"setp.eq.b32 \1, \2, 77;"),
    "pages below 0 are read": (BROKEN, r"setp\.gt\.s32\s+(%p\d+), (%r\d+), -1;", r"setp.gt.s32 \1, \2, -9;"),
    "another request's start": (ROWS, r"(ld\.global\.b32\s+%r\d+, \[%rd\d+)(\];\s*setp\.lt\.s32)", r"\1+4\2"),
}  # fmt: skip


# One source serves all architectures, so each bug is planted in the kernel of one of them.
@pytest.mark.parametrize(
    ("bug", "arch"), list(zip(BUGS, cycle(ARCHS.values()), strict=False)), ids=lambda value: getattr(value, "name", value)
)
def test_planted_bugs_are_found(bug: str, arch: Arch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case, pattern, replacement = BUGS[bug]
    workshop = Workshop.open(arch, tmp_path, monkeypatch)
    assert workshop.is_found(case, replacement, workshop.places(case, pattern))


@pytest.mark.parametrize(
    ("case", "arch"),
    list(zip([NASTY, ROWS], ARCHS.values(), strict=True)),
    ids=lambda value: value.id if isinstance(value, PagedCacheCase) else value.name,
)
def test_the_unbroken_kernels_pass(case: PagedCacheCase, arch: Arch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Workshop.open(arch, tmp_path, monkeypatch).check_unbroken(case)


def test_unused_memory_is_not_read(arch: Arch) -> None:
    """Of block table, starts and ends there is no more than a call may read: the simulator would find a read beyond."""
    tensors = make_cache_gather_tensors(ROWS)
    with cute_mla.simulate(arch.name):
        gather_kv_cache(
            tensors.k_cache, tensors.block_table.contiguous(), tensors.cu_seqlens, ROWS.keys, starts=tensors.starts, out=None
        )  # fmt: skip
