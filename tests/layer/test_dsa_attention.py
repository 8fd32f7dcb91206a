"""The layer with sparse attention against a reference in fp64: prefill, decode, both, in steps, shared keys, shards, caches."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from cute_mla.layer import Shard, plan_sequences
from tests.layer.dsa_models import SPARSE, TOPK, V3_2, chosen, logits, sparse
from tests.layer.dsa_steps import SparseSequences
from tests.layer.mla_models import GLM_5, naive
from tests.layer.mla_steps import TOLERANCE

EVERY_MODEL = pytest.mark.parametrize("model", SPARSE)
LENGTHS = [0, 1, TOPK - 1, TOPK, TOPK + 1, 63, 64, 65]


@EVERY_MODEL
def test_prefill(model: str) -> None:
    """Every token chooses the reference's keys, in ascending order."""
    sequences = SparseSequences.drawn(SPARSE[model], LENGTHS)
    contexts = [0] * len(LENGTHS)
    out, batch = sequences.step(contexts, 0)
    sequences.own.expect(out, sequences.expected(contexts))
    seen = [row for states in sequences.own.hidden for row in chosen(logits(states, *_model(sequences)), TOPK)]
    for positions, row in zip(sequences.positions(batch), seen, strict=True):
        assert positions.tolist() == row.nonzero().flatten().tolist()


@EVERY_MODEL
def test_the_choice_is_that_of_unrounded_keys(model: str) -> None:
    """But for keys near the threshold: rounding to e4m3 moves a few of a hundred."""
    sequences = SparseSequences.drawn(SPARSE[model], [96])
    _, batch = sequences.step([0], 0)
    exact = chosen(logits(sequences.own.hidden[0], *_model(sequences), rounded=False), TOPK)
    taken = torch.stack([torch.zeros(96, dtype=torch.bool).index_fill_(0, own, value=True) for own in sequences.positions(batch)])
    assert (taken.sum(1) == exact.sum(1)).all()
    assert (taken & exact)[TOPK:].sum() >= 0.9 * exact[TOPK:].sum()


@EVERY_MODEL
@pytest.mark.parametrize("s_q", [1, 2])
def test_decode(model: str, s_q: int) -> None:
    contexts = [0, 1, TOPK - 1, TOPK, 63, 64, 65]
    sequences = SparseSequences.drawn(SPARSE[model], [context + s_q for context in contexts])
    sequences.until(contexts).step([0] * len(contexts), 0)
    out, _ = sequences.step(contexts, len(contexts))
    sequences.own.expect(out, sequences.expected(contexts))


@EVERY_MODEL
@pytest.mark.parametrize("chunk_tokens", [7, 1000])
def test_decode_and_prefill_in_one_batch(model: str, chunk_tokens: int) -> None:
    """Two decodes, then a prefill without context, one without new tokens, and two with both."""
    contexts, new = [64, 3, 0, 5, 65, 20], [1, 1, 30, 0, 7, 3]
    sequences = SparseSequences.drawn(SPARSE[model], [a + b for a, b in zip(contexts, new, strict=True)])
    sequences.until(contexts).step([0] * 6, 0)
    out, _ = sequences.step(contexts, 2, chunk_tokens=chunk_tokens)
    sequences.own.expect(out, sequences.expected(contexts))


def test_requests_without_new_tokens() -> None:
    sequences = SparseSequences.drawn(V3_2, [40, 65])
    sequences.step([0, 0], 0)
    out, _ = sequences.step([40, 65], 0)
    assert out.shape == (0, 96)


def test_a_sequence_in_steps_is_the_sequence() -> None:
    whole = SparseSequences.drawn(V3_2, [75])
    expected = whole.expected([0])
    for begin, end, decodes in [(0, 12, 0), (12, 40, 0), (40, 70, 0), *[(token, token + 1, 1) for token in range(70, 75)]]:
        part = whole.until([end])
        out, _ = part.step([begin], decodes)
        part.own.expect(out, expected[begin:end])


@pytest.mark.parametrize("model", ["v3_2", "glm_5"])
def test_a_wrong_pairing_of_rope_is_wrong_beyond_topk(model: str) -> None:
    """The planted bug: invisible up to topk keys, and far beyond the tolerance behind them."""
    sequences = SparseSequences.drawn(SPARSE[model], [65])
    swapped = {**sequences.own.config, "indexer_rope_interleave": not sequences.own.config.get("indexer_rope_interleave", False)}
    planted = replace(sequences, own=replace(sequences.own, config=swapped))
    out, _ = planted.step([0], 0)
    error = (out - sequences.expected([0])).abs().amax(dim=1) / sequences.expected([0]).abs().max()
    assert error[:TOPK].max() <= TOLERANCE[torch.float32]
    assert error[TOPK:].max() > 0.1


@pytest.mark.parametrize("lengths", [[TOPK], [3, TOPK]])
def test_up_to_topk_keys_no_indexer_is_asked(lengths: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefill and decode are dense; keys are written all the same, and a later step chooses by them."""
    sequences = SparseSequences.drawn(V3_2, [length + 5 for length in lengths])
    short = sequences.until(lengths)
    layer = sequences.layer()
    with monkeypatch.context() as patched:
        patched.setattr(type(layer.indexer), "queries", _forbidden)
        contexts = [length - 1 for length in lengths]
        out, batch = sequences.until(contexts).step([0] * len(lengths), 0, layer)
        assert batch.selection.prefill is None
        out, batch = short.step(contexts, len(lengths), layer)
        assert batch.selection.decode is None
    short.own.expect(out, short.own.expected(contexts))
    out, _ = sequences.step(lengths, 0)
    sequences.own.expect(out, sequences.expected(lengths))


@pytest.mark.parametrize("decodes", [0, 2])
def test_layers_share_a_choice(decodes: int) -> None:
    """A layer without an indexer attends to the keys of the one before it, and not to its own."""
    contexts = [64, 30]
    first = SparseSequences.drawn(GLM_5, [65, 31])
    second = replace(first, own=replace(first.own, k_cache=first.own.k_cache.clone()))
    other = {name: weight.flip(0) if "q_b_proj" in name else weight for name, weight in first.own.weights.items()}
    second = replace(second, own=replace(second.own, weights=other))
    sharing = second.layer(indexed=False)
    for part, starts, count in ((first.until(contexts), [0, 0], 0), (first, contexts, decodes)):
        _, batch = part.step(starts, count)
        out = sharing(torch.cat(part.own.new_tokens(starts)), second.own.k_cache, batch)
        seen = [chosen(logits(states, *_model(first)), TOPK) for states in part.own.hidden]
        whole = [naive(states, other, first.own.config, own) for states, own in zip(part.own.hidden, seen, strict=True)]
        second.own.expect(out, torch.cat([own[start:] for own, start in zip(whole, starts, strict=True)]))


def test_sharing_with_nobody() -> None:
    sequences = SparseSequences.drawn(V3_2, [TOPK + 1])
    for contexts, decodes in (([0], 0), ([TOPK], 1)):
        with pytest.raises(ValueError, match=r"the layer has no indexer, and batch\.selection is empty; supported: behind a layer with"):
            sequences.step(contexts, decodes, sequences.layer(indexed=False))


def test_without_caches() -> None:
    """Whole sequences, as plan_sequences packs them; gradients only where no token chooses."""
    sequences = SparseSequences.drawn(V3_2, [TOPK, 40])
    hidden, batch = torch.cat(sequences.own.hidden), plan_sequences([TOPK, 40], "cpu")
    layer = sequences.layer()
    torch.testing.assert_close(layer(hidden, None, batch), sequences.expected([0, 0]), rtol=0, atol=1e-4)
    with pytest.raises(ValueError, match="requires grad, and the batch has sparse attention"):
        layer(hidden.requires_grad_(), None, batch)
    short = layer(hidden[:TOPK], None, plan_sequences([TOPK], "cpu"))
    short.sum().backward()
    assert hidden.grad is not None
    assert hidden.grad[:TOPK].abs().max() > 0


@EVERY_MODEL
def test_two_ranks_add_up_to_the_whole(model: str) -> None:
    """Heads of attention are divided; every rank has the whole indexer, and chooses the same keys."""
    sequences = SparseSequences.drawn(SPARSE[model], [40, 70], heads=2)
    sequences = _with_heads(sequences, 4)
    contexts = [39, 60]
    parts, seen = [], []
    for rank in range(2):
        own = replace(sequences, own=replace(sequences.own, k_cache=sequences.own.k_cache.clone()))
        own.until(contexts).step([0, 0], 0, own.layer(shard=Shard(rank, 2)))
        out, batch = own.step(contexts, 1, own.layer(shard=Shard(rank, 2)))
        parts.append(out)
        seen.append([positions.tolist() for positions in own.positions(batch)])
    sequences.own.expect(parts[0] + parts[1], sequences.expected(contexts))
    assert seen[0] == seen[1]


@pytest.mark.parametrize("decodes", [0, 2])
def test_a_cache_of_656_bytes(decodes: int) -> None:
    """Rounded to e4m3, and not by more; also where no token chooses."""
    contexts = [64, 9]
    sequences = SparseSequences.drawn(V3_2, [65, 10], torch.bfloat16, "fp8_656")
    sequences.until(contexts).step([0, 0], 0)
    out, batch = sequences.step(contexts, decodes)
    assert out.dtype == torch.bfloat16
    expected = torch.cat([
        naive(states, *_model(sequences), _mask(own, len(states)))[-1:]
        for states, own in zip(sequences.own.hidden, sequences.positions(batch), strict=True)
    ])  # fmt: skip
    assert (out - expected).abs().max() <= 0.05 * expected.abs().max()
    short = sequences.until([TOPK, 10])
    out, _ = short.step([TOPK - 1, 9], 2)
    assert (out - short.own.expected([TOPK - 1, 9])).abs().max() <= 0.05 * out.abs().max()


def test_slots_of_minus_one_are_not_written() -> None:
    """In prefill their keys are chosen and attended to all the same."""
    sequences = SparseSequences.drawn(V3_2, [30])
    slots = sequences.own.plan([0], 0).slot_mapping
    slots[2], slots[5] = -1, -1
    out, _ = sequences.step([0], 0, slot_mapping=slots)
    sequences.own.expect(out, sequences.expected([0]))
    page = sequences.index_cache[sequences.own.block_table[0, 0]].flatten()
    unwritten = (page[: 64 * 128].view(64, 128) == 0xFF).all(dim=1)
    assert unwritten.tolist() == [False, False, True, False, False, True] + [False] * 24 + [True] * 34
    assert (page[64 * 128 :].view(64, 4) == 0xFF).all(dim=1).tolist() == unwritten.tolist()
    assert (sequences.index_cache[0] == 0xFF).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"index_cache": None}, "index_cache is None, and tokens choose their keys; supported: a cache of the indexer's keys"),
        ({"index_cache": torch.zeros(3, 64, 1, 132)}, r"index_cache has dtype torch\.float32; supported: torch\.uint8"),
        ({"index_cache": torch.zeros(9, 64, 1, 132, dtype=torch.uint8)}, r"index_cache has shape \[9, 64, 1, 132\]; supported with this k"),
        ({"k_cache": torch.zeros(3, 64, 1, 576).to(torch.float8_e4m3fn)}, "k_cache is e4m3 with one scale, and attention is sparse"),
        ({"descale_q": torch.ones(1)}, "descale_q is given, and k_cache is not e4m3; supported"),
    ],
)
def test_what_is_refused(change: dict[str, Any], message: str) -> None:
    sequences = SparseSequences.drawn(V3_2, [100])
    given = {"k_cache": sequences.own.k_cache, "index_cache": sequences.index_cache, **change}
    assert len(sequences.own.k_cache) == 3
    with pytest.raises(ValueError, match=message):
        sequences.layer()(sequences.own.hidden[0], given.pop("k_cache"), sequences.own.plan([0], 0), **given)


def _model(sequences: SparseSequences) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    return sequences.own.weights, sequences.own.config


def _mask(positions: torch.Tensor, length: int) -> torch.Tensor:
    """Return bool [length, length]: the last token sees these positions, all others see all before them."""
    seen = torch.ones(length, length, dtype=torch.bool).tril()
    seen[-1] = torch.zeros(length, dtype=torch.bool).index_fill_(0, positions, value=True)
    return seen


def _with_heads(sequences: SparseSequences, heads: int) -> SparseSequences:
    from tests.layer.dsa_models import indexer_checkpoint

    config = {**sequences.own.config, "num_attention_heads": heads}
    return replace(sequences, own=replace(sequences.own, config=config, weights=indexer_checkpoint(config)))


def _forbidden(*_: object) -> None:
    raise AssertionError("the indexer was asked")


def test_the_reference_without_a_choice_is_dense() -> None:
    sequences = SparseSequences.drawn(V3_2, [TOPK])
    torch.testing.assert_close(sequences.own.expected([0], sparse), sequences.own.expected([0]))
