"""Placement of keys on ranks, compared with keys dealt out one by one."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from cute_mla.parallel import ContextParallel, ContextShard

DEALS = tuple(product((1, 2, 3, 8), (1, 5, 64)))


def dealt(length: int, world: int, interleave: int) -> list[list[int]]:
    """Return the positions that each rank gets."""
    ranks: list[list[int]] = [[] for _ in range(world)]
    for position in range(length):
        ranks[position // interleave % world].append(position)
    return ranks


@pytest.mark.parametrize(("world", "interleave"), DEALS)
def test_local_lengths(world: int, interleave: int) -> None:
    lengths = [-3, 0, 1, 2, 63, 64, 65, 128, 200, 1000]
    for rank in range(world):
        shard = ContextShard(rank, world, interleave)
        for dtype in (torch.int32, torch.int64):
            local = shard.local_lengths(torch.tensor(lengths, dtype=dtype).view(2, 5))
            assert local.dtype == dtype
            assert local.flatten().tolist() == [len(dealt(length, world, interleave)[rank]) for length in lengths]


@pytest.mark.parametrize(("world", "interleave"), DEALS)
def test_slots_are_those_of_keys_one_behind_the_other(world: int, interleave: int) -> None:
    page_size, length = 16, 400
    for rank, positions in enumerate(dealt(length, world, interleave)):
        pages = torch.randperm(30, generator=torch.Generator().manual_seed(rank))[: -(-len(positions) // page_size)].int()
        shard = ContextShard(rank, world, interleave)
        slots = shard.slots(torch.arange(length)[None], pages[None], page_size)[0]
        wanted = [int(pages[place // page_size]) * page_size + place % page_size for place in range(len(positions))]
        assert slots.dtype == torch.int64
        assert slots[positions].tolist() == wanted
        assert (slots >= 0).sum() == len(positions)


def test_what_has_no_slot() -> None:
    shard = ContextShard(0, 2, 4)
    table = torch.tensor([[7, 5], [3, 9]], dtype=torch.int32)
    positions = torch.tensor([[-1, 0, 3, 4, 8], [-(1 << 31), 15, 16, 24, (1 << 31) - 1]], dtype=torch.int32)
    assert shard.slots(positions, table, 4).tolist() == [[-1, 28, 31, -1, 20], [-1, -1, -1, -1, -1]]
    assert shard.slots(positions, table[:, :0], 4).tolist() == [[-1] * 5] * 2


def test_local_indices_are_the_own_ones_in_their_order() -> None:
    table = torch.tensor([[2], [0]], dtype=torch.int32)
    positions = torch.tensor([[[5, 0, -1, 3, 2], [1, 1, -9, 3, 5]], [[4, 2, 0, 1, 3], [-1, -1, -1, -1, -1]]], dtype=torch.int32)
    indices, topk_length = ContextShard(0, 2, 1).local_indices(positions, table, 8)
    assert indices.tolist() == [[[16, 17, -1, -1, -1], [-1] * 5], [[2, 1, 0, -1, -1], [-1] * 5]]
    assert topk_length.tolist() == [2, 3]
    indices, topk_length = ContextShard(1, 2, 1).local_indices(positions, table, 8)
    assert indices.tolist() == [[[18, 17, -1, -1, -1], [16, 16, 17, 18, -1]], [[0, 1, -1, -1, -1], [-1] * 5]]
    assert topk_length.tolist() == [4, 2]
    assert (indices.dtype, topk_length.dtype) == (torch.int32, torch.int32)


@pytest.mark.parametrize("page", [1 << 25, 1 << 26, (1 << 31) - 1, -1, -(1 << 31)])
def test_a_page_outside_the_cache_gives_an_index_outside_the_cache(page: int) -> None:
    """2^26 pages of 64 keys on, the slot needs more than 32 bits."""
    table = torch.tensor([[page, 2]], dtype=torch.int32)
    indices, _ = ContextShard(0, 1).local_indices(torch.tensor([[[0, 63, 64]]], dtype=torch.int32), table, 64)
    assert [index for index in indices.flatten().tolist() if 0 <= index < (1 << 31) - 64] == [2 * 64]


@pytest.mark.parametrize("shape", [(0, 2, 3), (2, 0, 3), (2, 2, 0)])
def test_local_indices_of_nothing(shape: tuple[int, int, int]) -> None:
    table = torch.zeros(shape[0], 1, dtype=torch.int32)
    indices, topk_length = ContextShard(0, 2).local_indices(torch.zeros(shape, dtype=torch.int32), table, 8)
    assert indices.shape == shape
    assert topk_length.tolist() == [0] * shape[0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((2, 2), "rank is 2; supported: an integer, 0 to 1"),
        ((-1, 2), "rank is -1"),
        ((0, 0), "world is 0; supported: an integer, 1 or more"),
        ((0, 2, 0), "interleave is 0; supported: an integer, 1 or more"),
        ((True, 2), "rank is True; supported: an integer, 0 to 1"),
        ((0, 2.0), "world is 2.0; supported: an integer"),
        ((0, 4, 1 << 29), r"interleave is 536870912 with a world of 4; supported: interleave \* world to 2147483647"),
        ((0, 1 << 70), "supported: interleave"),
    ],
)
def test_bad_shards(arguments: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ContextShard(*arguments)


@pytest.mark.parametrize("page_size", [0, -1, True, 64.0, "64", None, 1 << 31, 1 << 70])
def test_bad_page_sizes(page_size: object) -> None:
    positions, table = torch.zeros(3, 1, 5, dtype=torch.int32), torch.zeros(3, 4, dtype=torch.int32)
    for place in (ContextShard(0, 2).slots, ContextShard(0, 2).local_indices):
        with pytest.raises(ValueError, match=r"^page_size is .*; supported: an integer, 1 to 2147483647"):
            place(positions if place.__name__ == "local_indices" else positions[:, 0], table, page_size)  # type: ignore[arg-type]


def test_bad_tensors() -> None:
    shard, table = ContextShard(0, 2), torch.zeros(3, 4, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"lengths has dtype torch.float32; supported: torch.int32, torch.int64"):
        shard.local_lengths(torch.zeros(3))
    with pytest.raises(ValueError, match=r"positions has shape \[2, 5\]; supported with this block_table: \[3, n\]"):
        shard.slots(torch.zeros(2, 5, dtype=torch.int32), table, 64)
    with pytest.raises(ValueError, match=r"block_table has dtype torch.int64"):
        shard.slots(torch.zeros(3, 5, dtype=torch.int32), table.long(), 64)
    with pytest.raises(ValueError, match="page_size is 0"):
        shard.slots(torch.zeros(3, 5, dtype=torch.int32), table, 0)
    with pytest.raises(ValueError, match=r"positions has shape \[3, 5\]; supported: \[batch, s_q, topk\]"):
        shard.local_indices(torch.zeros(3, 5, dtype=torch.int32), table, 64)


def test_a_process_without_a_group_is_told_so() -> None:
    with pytest.raises(ValueError, match=r"torch\.distributed is not initialised; supported: ContextParallel after init_process_group"):
        ContextParallel()
