"""Masks of the keys that prefill tokens choose: bit by bit, and the layer with them against the layer without."""

from __future__ import annotations

import pytest
import torch

from cute_mla.layer import ChosenKeys, key_masks
from cute_mla.layer.key_masks import mask_of_rows
from cute_mla.reference import mask_keys
from tests.layer.dsa_models import V3_2
from tests.layer.dsa_steps import SparseSequences
from tests.layer.mla_models import naive
from tests.layer.mla_steps import TOLERANCE

MOST = 2**31 - 1


@pytest.mark.parametrize("at_once", [1, 300, 1 << 26])
@pytest.mark.parametrize("keys", [0, 1, 31, 32, 33, 64, 65, 200])
def test_bits_of_rows(keys: int, at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens with no keys, some and all, in any order, twice, in front of and behind their own, beyond the count; any number at a time."""
    monkeypatch.setattr(key_masks, "_BYTES_AT_ONCE", at_once)
    draw = torch.Generator().manual_seed(keys)
    tokens, topk = 9, 40
    firsts = torch.randint(0, 1000, (tokens,), generator=draw, dtype=torch.int32)
    firsts[3] = 0
    positions = torch.randint(-3, keys + 3, (tokens, topk), generator=draw)
    rows = (firsts.unsqueeze(1) + positions).int()
    rows[0] = -1
    rows[1, 4:9] = torch.tensor([MOST, -MOST - 1, -2, -1, MOST - 32], dtype=torch.int32)
    rows[3, :3] = torch.tensor([MOST, -MOST - 1, -1], dtype=torch.int32)
    counts = torch.randint(0, topk + 1, (tokens,), generator=draw, dtype=torch.int32)
    counts[1:4] = topk
    counts[4], counts[5] = -7, MOST
    mask = mask_of_rows(ChosenKeys(rows.unsqueeze(1), counts), firsts, keys)
    assert (mask.dtype, tuple(mask.shape), mask.stride(1)) == (torch.int32, (tokens, -(-keys // 32)), 1)
    wanted = torch.zeros(tokens, keys, dtype=torch.bool)
    for token, count in enumerate(counts.tolist()):
        for row in rows[token, : max(count, 0)].tolist():
            if row >= 0 and 0 <= row - int(firsts[token]) < keys:
                wanted[token, row - int(firsts[token])] = True
    assert wanted.any() or keys < 2
    assert torch.equal(mask_keys(mask, keys), wanted)


def test_no_tokens_and_no_indices() -> None:
    none = torch.zeros(0, dtype=torch.int32)
    assert mask_of_rows(ChosenKeys(torch.zeros(0, 1, 8, dtype=torch.int32), none), none, 70).shape == (0, 3)
    two = torch.zeros(2, dtype=torch.int32)
    assert not mask_of_rows(ChosenKeys(torch.zeros(2, 1, 0, dtype=torch.int32), two), two, 70).any()


CONTEXTS, ENDS = [64, 0, 5, 130], [70, 40, 5, 200]


@pytest.mark.parametrize("chunk_tokens", [7, 100, 1000])
def test_masked_prefill_is_sparse_prefill(chunk_tokens: int) -> None:
    """Against the layer that always chooses sparse prefill: cached keys in chunks of every size, requests without either kind of keys."""
    sequences = SparseSequences.drawn(V3_2, ENDS)
    sequences.until(CONTEXTS).step([0] * 4, 0)
    masked, batch = sequences.step(CONTEXTS, 0, chunk_tokens=chunk_tokens)
    assert batch.selection.masks is not None
    assert batch.prefill is not None
    assert len(batch.selection.masks.masks) == 1 + len(batch.prefill.chunks)
    chosen, other = sequences.step(CONTEXTS, 0, sequences.layer(batch_invariant=True), chunk_tokens=chunk_tokens)
    assert other.selection.masks is None
    torch.testing.assert_close(masked, chosen, rtol=0, atol=2e-5)
    sequences.own.expect(masked, sequences.expected(CONTEXTS))


def test_layers_share_masks_until_another_chooses(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    mask = mask_of_rows

    def counted(chosen: ChosenKeys, firsts: torch.Tensor, keys: int) -> torch.Tensor:
        made.append(keys)
        return mask(chosen, firsts, keys)

    monkeypatch.setattr("cute_mla.layer.choosing.mask_of_rows", counted)
    sequences = SparseSequences.drawn(V3_2, [40])
    out, batch = sequences.step([0], 0)
    hidden = sequences.own.hidden[0]
    again = sequences.layer(indexed=False)(hidden, sequences.own.k_cache, batch)
    assert (made, torch.equal(out, again)) == ([40], True)
    sequences.layer()(hidden, sequences.own.k_cache, batch, index_cache=sequences.index_cache)
    assert made == [40, 40]
    assert batch.selection.prefill is not None
    few = _first_alone(batch.selection.prefill)
    batch.selection.prefill = few
    other = sequences.layer(indexed=False)(hidden, sequences.own.k_cache, batch)
    assert made == [40, 40, 40]
    assert not torch.equal(out, other)


def _first_alone(keys: ChosenKeys) -> ChosenKeys:
    """Return the first key of each token alone."""
    return keys._replace(counts=torch.ones_like(keys.counts))


@pytest.mark.parametrize(("dtype", "masked"), [(torch.bfloat16, True), (torch.float16, False)])
def test_fp16_has_no_masks(dtype: torch.dtype, masked: bool) -> None:
    """Keys that a layer elsewhere chose, of which there are more than topk: kernels with a mask are built for bf16 alone."""
    sequences = SparseSequences.drawn(V3_2, [40], dtype)
    batch = sequences.own.plan([0], 0)
    chosen = torch.arange(40, dtype=torch.int32).unsqueeze(1) - torch.arange(15, -1, -1, dtype=torch.int32)
    batch.selection.prefill = ChosenKeys(chosen.unsqueeze(1), torch.full((40,), 16, dtype=torch.int32))
    out = sequences.layer(indexed=False)(sequences.own.hidden[0], sequences.own.k_cache, batch)
    assert (batch.selection.masks is not None) == masked
    key = torch.arange(40)
    window = (key <= key.unsqueeze(1)) & (key > key.unsqueeze(1) - 16)
    expected = naive(sequences.own.hidden[0], sequences.own.weights, sequences.own.config, window)
    assert (out - expected).abs().max() <= TOLERANCE[torch.bfloat16] * expected.abs().max()
