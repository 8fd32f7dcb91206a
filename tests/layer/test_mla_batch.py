"""Steps planned from lengths: positions, slots, chunks, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from cute_mla.layer import DecodeRequests, plan_batch, plan_sequences

TABLE = torch.tensor([[7, 2, -1], [5, -1, -1], [1, 4, 3]], dtype=torch.int32)


def test_a_mixed_step() -> None:
    """A decode of two tokens behind 31, a prefill of three from the first on, one of two behind 47; pages of 16."""
    batch = plan_batch([2, 3, 2], [30, 0, 46], TABLE, 16, decodes=1, chunk_tokens=32)
    assert batch.tokens == 7
    assert batch.positions.tolist() == [30, 31, 0, 1, 2, 46, 47]
    assert batch.slot_mapping.tolist() == [2 * 16 + 14, 2 * 16 + 15, 80, 81, 82, 3 * 16 + 14, 3 * 16 + 15]
    assert batch.decode is not None
    assert batch.decode.s_q == 2
    assert batch.decode.block_table.tolist() == [[7, 2, -1]]
    assert batch.decode.cache_seqlens.tolist() == [32]
    assert batch.decode.cache_seqlens.dtype == torch.int32
    assert batch.prefill is not None
    assert (batch.prefill.tokens, batch.prefill.max_seqlen) == (5, 3)
    assert batch.prefill.cu_seqlens.tolist() == [0, 3, 5]
    first, second = batch.prefill.chunks
    for chunk, start, keys in ((first, 0, 32), (second, 32, 14)):
        assert chunk.block_table.tolist() == [[5, -1, -1], [1, 4, 3]]
        assert (chunk.starts.tolist(), chunk.starts.dtype) == ([start, start], torch.int32)
        assert (chunk.cu_seqlens.tolist(), chunk.keys, chunk.max_seqlen) == ([0, 0, keys], keys, keys)


def test_chunks_are_shared_by_the_requests_that_have_a_context() -> None:
    batch = plan_batch([1, 1, 1], [20, 0, 5], TABLE, 16, chunk_tokens=16)
    assert batch.prefill is not None
    assert [chunk.cu_seqlens.tolist() for chunk in batch.prefill.chunks] == [[0, 8, 8, 13], [0, 8, 8, 8], [0, 4, 4, 4]]
    assert [(chunk.keys, chunk.starts.tolist()) for chunk in batch.prefill.chunks] == [(13, [0] * 3), (8, [8] * 3), (4, [16] * 3)]


def test_only_decodes_and_nothing() -> None:
    batch = plan_batch([1, 1, 1], [0, 0, 0], TABLE, 16, decodes=3)
    assert batch.prefill is None
    assert batch.positions.tolist() == [0, 0, 0]
    nothing = plan_batch([], [], TABLE[:0], 16)
    assert (nothing.tokens, nothing.decode, nothing.prefill) == (0, None, None)


def test_whole_sequences_are_a_prefill_that_writes_nothing() -> None:
    lengths = [3, 0, 2]
    batch, prefill = plan_sequences(lengths, "cpu"), plan_batch(lengths, [0, 0, 0], TABLE, 16)
    assert batch.decode is None
    assert batch.slot_mapping.tolist() == [-1] * 5
    assert torch.equal(batch.positions, prefill.positions)
    assert repr(batch.prefill) == repr(prefill.prefill)
    assert batch.prefill is not None
    assert batch.prefill.cu_seqlens.tolist() == [0, 3, 3, 5]
    nothing = plan_sequences([], "cpu")
    assert (nothing.tokens, nothing.prefill) == (0, None)
    with pytest.raises(ValueError, match=r"lengths\[1\] is -1; supported: an integer, 0 or more"):
        plan_sequences([1, -1], "cpu")


def test_slots_beyond_32_bits() -> None:
    batch = plan_batch([1], [20], torch.tensor([[2**27, 2**28]], dtype=torch.int32), 16)
    assert batch.slot_mapping.tolist() == [2**32 + 4]


def test_slots_of_the_caller() -> None:
    slots = torch.tensor([-1, 9, 3])
    assert plan_batch([1, 1, 1], [0, 0, 0], TABLE, 16, slot_mapping=slots).slot_mapping is slots


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"query_lengths": [1, 1]}, "there are 2 query_lengths and 3 context_lengths; supported: as many"),
        ({"context_lengths": [0, -1, 0]}, r"context_lengths\[1\] is -1; supported: an integer, 0 or more"),
        ({"query_lengths": [1, 1.5, 1]}, r"query_lengths\[1\] is 1\.5; supported: an integer, 0 or more"),
        ({"decodes": 4}, "decodes is 4 with 3 requests; supported: 0 to all of them"),
        ({"decodes": 2, "query_lengths": [1, 2, 1]}, r"decode requests have \[1, 2\] new tokens; supported: equally many, 1 or more"),
        ({"decodes": 1, "query_lengths": [0, 2, 1]}, r"decode requests have \[0\] new tokens; supported: equally many, 1 or more"),
        ({"block_table": TABLE[:2]}, r"block_table has shape \[2, 3\]; supported: \[3, pages per request\]"),
        ({"block_table": TABLE.long()}, "block_table has dtype torch.int64; supported: torch.int32"),
        ({"page_size": 48}, "page size is 48; supported: 16, 32 and multiples of 64"),
        ({"chunk_tokens": 0}, "chunk_tokens is 0; supported: an integer, 1 or more"),
        ({"context_lengths": [0, 48, 0]}, r"request 1 has 48 \+ 1 keys; supported with this block table: up to 48"),
        ({"slot_mapping": torch.zeros(2, dtype=torch.int64)}, r"slot_mapping has shape \[2\]; supported with these requests: \[3\]"),
        ({"slot_mapping": torch.zeros(3)}, "slot_mapping has dtype torch.float32; supported: torch.int64, torch.int32"),
    ],
)
def test_what_is_refused(change: dict[str, Any], message: str) -> None:
    given = {"query_lengths": [1, 1, 1], "context_lengths": [0, 0, 0], "block_table": TABLE, "page_size": 16, **change}
    with pytest.raises(ValueError, match=message):
        plan_batch(**given)


def test_tokens_that_the_requests_do_not_have() -> None:
    batch = plan_batch([1, 1, 1], [0, 0, 0], TABLE, 16, decodes=3)
    with pytest.raises(ValueError, match=r"positions has shape \[3\]; supported with these requests: \[2\]"):
        replace(batch, decode=DecodeRequests(TABLE[:2], torch.ones(2, dtype=torch.int32)))
