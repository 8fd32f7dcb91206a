"""Findings of used block-table entries outside the cache: which entries count as used, and what a finding says."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cute_mla.manifest import KernelEntry
from cute_mla.runtime.block_tables import findings_of
from cute_mla.spec import cache_gather, cache_write, dense_decode
from cute_mla.spec.abi import Param
from cute_mla.spec.split_plan import NO_WINDOW
from tests.runtime.fake_artifacts import entry, fake_cubin

NONE = -(1 << 31)
FAR = (1 << 31) - 1


def kernel(op: str, params: tuple[Param, ...]) -> KernelEntry:
    return entry(op, "x", params, fake_cubin(), "")


def messages(kernel: KernelEntry, **given: Any) -> list[str]:
    """Return the findings of a launch with these arguments and None for all others."""
    return [str(finding) for finding in findings_of(kernel, [given.get(param.name) for param in kernel.params])]


def ints(*numbers: Any) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


def decode(table: torch.Tensor, *lengths: int, max_keys: int = 48) -> list[str]:
    """Return the findings of a decode over 5 pages of 16 keys."""
    given = {"block_table": table, "cache_seqlens": ints(*lengths), "page_size": 16, "pages": 5, "max_keys": max_keys}
    given |= {"reach": NO_WINDOW.reach, "sink_keys": NO_WINDOW.sink_keys}
    return messages(kernel("dense_decode", dense_decode.PARAMS), **given)


def gather(table: torch.Tensor, ends: list[int], starts: list[int] | None, rows: int = 99) -> list[str]:
    """Return the findings of a gather out of 5 pages of 16 keys."""
    given = {"starts": None if starts is None else ints(*starts), "page_size": 16, "pages": 5, "rows": rows}
    return messages(kernel("cache_gather", cache_gather.PARAMS), block_table=table, cu_seqlens=ints(*ends), **given)


@pytest.mark.parametrize("number", [5, -1, NONE, FAR])
def test_an_entry_that_a_length_reaches(number: int) -> None:
    table = ints([4, number, 0], [0, 1, number])
    assert decode(table, 16, 32) == []
    assert decode(table, 17, 32) == [
        f"block_table: block_table[0, 1] is {number} and request 0 uses it; supported: 0 to 4; "
        "the page reads as zeros (used entries outside the cache: 1)"
    ]
    assert decode(table, 0, 33)[0].startswith(f"block_table: block_table[1, 2] is {number} and request 1 uses it")
    assert decode(table, 17, 48)[0].endswith("(used entries outside the cache: 2)")


def test_lengths_count_as_the_device_clips_them() -> None:
    table = ints([4, 3, -1])
    assert decode(table, -7) == []
    assert decode(ints([-1, -1, -1]), NONE) == []
    assert len(decode(table, FAR)) == 1
    assert decode(table, FAR, max_keys=32) == []


def test_tables_of_no_requests_and_of_no_columns() -> None:
    assert decode(torch.empty(0, 3, dtype=torch.int32)) == []
    assert decode(torch.empty(1, 0, dtype=torch.int32), 5, max_keys=0) == []


def test_a_table_that_is_a_slice_of_another() -> None:
    wide = ints([-1, 4, 3, -1], [-1, 2, 1, -1])
    assert decode(wide[:, 1:3], 32, 32) == []
    assert len(decode(wide[:, 1:], 32, 33)) == 1


def test_an_entry_that_a_gathered_row_asks_for() -> None:
    table = ints([-1, 3, 9], [0, NONE, 2])
    assert gather(table, [0, 16, 32], [16, 32]) == []
    assert gather(table, [0, 16, 32], [16, 0]) == []
    assert "block_table[0, 0] is -1" in gather(table, [0, 16, 32], [15, 0])[0]
    assert "block_table[0, 2] is 9" in gather(table, [0, 17, 17], [16, 0])[0]
    assert f"block_table[1, 1] is {NONE}" in gather(table, [0, 0, 17], None)[0]
    assert gather(table, [0, 0, 17], None, rows=16) == [], "rows of out end before"
    assert gather(table, [0, 5, 5], [-1, 16]) == [], "a start below 0 is no key, and the other request has none"
    assert gather(table, [0, 5, 9], [48, FAR]) == [], "beyond the block table"


def test_kernels_without_a_block_table_have_no_findings() -> None:
    assert messages(kernel("cache_write", cache_write.PARAMS), pages=0, page_size=16) == []
