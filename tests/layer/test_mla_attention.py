"""The layer against two references: prefill, decode, both in one batch, contexts in the cache, shards, and what is refused."""

from __future__ import annotations

import logging
import math
from dataclasses import replace

import pytest
import torch

from cute_mla.layer import DecodeRequests, MlaAttention, MlaConfig, MlaWeights, Shard, plan_batch
from cute_mla.layer.path import warn_once
from cute_mla.runtime.current import has_kernels
from tests.layer.mla_models import MODELS, PREFIX, V2_LITE, V3, absorbed, checkpoint, naive, project
from tests.layer.mla_steps import Reference, Sequences

LENGTHS = (1, 63, 64, 65)
REFERENCES = pytest.mark.parametrize("reference", [naive, absorbed], ids=lambda function: function.__name__)
EVERY_MODEL = pytest.mark.parametrize("model", MODELS)


@EVERY_MODEL
def test_the_references_agree(model: str) -> None:
    sequences = Sequences.drawn(MODELS[model], [20])
    sequences.expect(sequences.expected([0], naive), sequences.expected([0], absorbed))


@EVERY_MODEL
@REFERENCES
def test_prefill(model: str, reference: Reference) -> None:
    contexts = [0] * 5
    sequences = Sequences.drawn(MODELS[model], [0, *LENGTHS])
    sequences.expect(sequences.step(contexts, 0), sequences.expected(contexts, reference))


@EVERY_MODEL
@REFERENCES
@pytest.mark.parametrize("s_q", [1, 2])
def test_decode(model: str, reference: Reference, s_q: int) -> None:
    contexts = [0, *LENGTHS]
    sequences = Sequences.drawn(MODELS[model], [context + s_q for context in contexts]).with_context(contexts)
    sequences.expect(sequences.step(contexts, 5), sequences.expected(contexts, reference))


@EVERY_MODEL
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_decode_and_prefill_in_one_batch(model: str, dtype: torch.dtype) -> None:
    """Two decodes, then a prefill without context, one without new tokens, and one with both."""
    contexts, new = [64, 3, 0, 5, 65], [1, 1, 17, 0, 7]
    sequences = Sequences.drawn(MODELS[model], [a + b for a, b in zip(contexts, new, strict=True)], dtype).with_context(contexts)
    sequences.expect(sequences.step(contexts, 2, chunk_tokens=60), sequences.expected(contexts))


@pytest.mark.parametrize("chunk_tokens", [1, 16, 1000])
def test_context_in_chunks(chunk_tokens: int) -> None:
    """Also in more chunks than are merged at a time, of which some requests have none."""
    contexts = [20, 0, 65]
    sequences = Sequences.drawn(V3, [25, 3, 70]).with_context(contexts)
    plan = sequences.plan(contexts, 0, chunk_tokens=chunk_tokens)
    assert plan.prefill is not None
    assert len(plan.prefill.chunks) == {1: 65, 16: 9, 1000: 1}[chunk_tokens]
    sequences.expect(sequences.step(contexts, 0, chunk_tokens=chunk_tokens), sequences.expected(contexts))


def test_without_yarn_and_with_an_epsilon_that_counts() -> None:
    plain = {**V3, "rope_scaling": None, "rope_theta": 500.0, "rms_norm_eps": 0.3}
    contexts = [9, 5]
    sequences = Sequences.drawn(plain, [10, 12]).with_context(contexts)
    sequences.expect(sequences.step(contexts, 1), sequences.expected(contexts))


def test_a_sequence_in_steps_is_the_sequence() -> None:
    """Prefill, another one on top of it, then tokens one by one: every step reads what those before it wrote."""
    whole = Sequences.drawn(V2_LITE, [75])
    expected = whole.expected([0])
    for begin, end, decodes in [(0, 40, 0), (40, 70, 0), *[(token, token + 1, 1) for token in range(70, 75)]]:
        part = replace(whole, hidden=(whole.hidden[0][:end],))
        part.expect(part.step([begin], decodes), expected[begin:end])


@pytest.mark.parametrize("page_size", [16, 32, 128])
def test_page_sizes_and_the_keys_written(page_size: int) -> None:
    sequences = Sequences.drawn(V3, [40, 33], page_size=page_size)
    sequences.expect(sequences.step([0, 0], 0), sequences.expected([0, 0]))
    expected = Sequences.drawn(V3, [40, 33], page_size=page_size).with_context([40, 33])
    torch.testing.assert_close(sequences.k_cache, expected.k_cache, rtol=1e-5, atol=1e-5, equal_nan=True)


def test_block_strided_cache() -> None:
    sequences = Sequences.drawn(V3, [70, 9])
    wide = torch.full((len(sequences.k_cache), 2, 64, 1, 576), math.nan)
    strided = replace(sequences, k_cache=wide[:, 1]).with_context([69, 8])
    strided.expect(strided.step([69, 8], 1), strided.expected([69, 8]))
    assert wide[:, 0].isnan().all()


def test_slots_of_minus_one_are_not_written() -> None:
    """In prefill their keys are attended to all the same."""
    sequences = Sequences.drawn(V3, [6])
    slots = sequences.plan([0], 0).slot_mapping
    slots[2], slots[5] = -1, -1
    sequences.expect(sequences.step([0], 0, slot_mapping=slots), sequences.expected([0]))
    page = sequences.k_cache[sequences.block_table[0, 0], :, 0]
    assert page.isnan().all(dim=1).tolist() == [False, False, True, False, False, True] + [True] * 58


def test_padded_decode_requests_give_zeros_and_write_nothing() -> None:
    sequences = Sequences.drawn(V3, [65, 1, 4]).with_context([64, 0, 3])
    plan = sequences.plan([64, 0, 3], 3)
    slots = plan.slot_mapping.clone()
    slots[1] = -1
    table = sequences.block_table.clone()
    table[1] = 2_000_000_000
    assert plan.decode is not None
    decode = DecodeRequests(table, torch.tensor([65, 0, 4], dtype=torch.int32))
    out = sequences.layer()(
        torch.cat(sequences.new_tokens([64, 0, 3])), sequences.k_cache, replace(plan, slot_mapping=slots, decode=decode)
    )
    expected = sequences.expected([64, 0, 3])
    expected[1] = 0
    sequences.expect(out, expected)
    assert sequences.k_cache[sequences.block_table[1, 0]].isnan().all()


@pytest.mark.parametrize("model", ["v3", "v2_lite"])
def test_biases(model: str) -> None:
    """Without q_lora_rank, queries have none."""
    contexts = [9, 5]
    sequences = Sequences.drawn({**MODELS[model], "attention_bias": True}, [10, 12]).with_context(contexts)
    sequences.expect(sequences.step(contexts, 1), sequences.expected(contexts))


@EVERY_MODEL
def test_two_ranks_add_up_to_the_whole(model: str) -> None:
    contexts = [30, 10]
    three = Sequences.drawn(MODELS[model], [31, 20])
    config = {**three.config, "num_attention_heads": 4, "attention_bias": True}
    sequences = replace(three, config=config, weights=checkpoint(config)).with_context(contexts)
    parts = []
    for rank in range(2):
        sized = MlaConfig.from_hugging_face(config)
        layer = MlaAttention(sized, MlaWeights.from_tensors(sequences.weights, sized, shard=Shard(rank, 2), prefix=PREFIX))
        assert layer.heads == 2
        parts.append(layer(torch.cat(sequences.new_tokens(contexts)), sequences.k_cache.clone(), sequences.plan(contexts, 1)))
    sequences.expect(parts[0] + parts[1], sequences.expected(contexts))


def test_checkpoints_whose_halves_are_pairs() -> None:
    """rope_interleave False: columns i and i + 32 turn together. The same layer, with its rotary rows in another order."""
    sequences = Sequences.drawn(V3, [9])
    order = torch.cat((torch.arange(0, 64, 2), torch.arange(1, 64, 2)))
    halves = dict(sequences.weights)
    q_b, kv_a = halves[f"{PREFIX}q_b_proj.weight"].clone(), halves[f"{PREFIX}kv_a_proj_with_mqa.weight"].clone()
    q_b.view(3, 192, -1)[:, 128:] = q_b.view(3, 192, -1)[:, 128:][:, order]
    kv_a[512:] = kv_a[512:][order]
    halves |= {f"{PREFIX}q_b_proj.weight": q_b, f"{PREFIX}kv_a_proj_with_mqa.weight": kv_a}
    other = replace(sequences, weights=halves, config={**sequences.config, "rope_interleave": False})
    other.expect(other.step([0], 0), sequences.expected([0]))


def test_no_tokens() -> None:
    sequences = Sequences.drawn(V3, [64])
    table = torch.empty(0, 1, dtype=torch.int32)
    empty = plan_batch([], [], table, 64)
    for batch in (empty, replace(empty, decode=DecodeRequests(table, table[:, 0]))):
        assert sequences.layer()(torch.empty(0, 96), sequences.k_cache, batch).shape == (0, 96)
    assert sequences.k_cache.isnan().all()


def test_the_reference_path_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    warn_once.cache_clear()
    sequences = Sequences.drawn(V3, [3])
    assert sequences.layer().path == "reference"
    with caplog.at_level(logging.WARNING, logger="cute_mla.layer"):
        sequences.step([0], 0)
        sequences.step([0], 0)
    (message,) = [record.getMessage() for record in caplog.records]
    assert "torch reference" in message
    assert "cpu" in message


@pytest.mark.parametrize(("capability", "expected"), [((8, 0), False), ((9, 0), True), ((10, 3), True), ((12, 0), False)])
def test_which_gpus_have_kernels(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], expected: bool) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert has_kernels(torch.device("cuda", 0), "dense_prefill_backward") is expected
    assert not has_kernels(torch.device("cpu"), "dense_prefill")


def test_the_projections_of_the_references_turn_keys() -> None:
    """A planted bug that all tests above would miss, were positions ignored on both sides."""
    sequences = Sequences.drawn(V3, [2])
    states = sequences.hidden[0][:1].repeat(2, 1)
    keys = project(states, sequences.weights, sequences.config)
    assert torch.equal(keys.latent[0], keys.latent[1])
    assert (keys.rotary[0] - keys.rotary[1]).abs().max() > 0.1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden": torch.zeros(3, 95)}, r"hidden has shape \[3, 95\]; supported with this batch: \[3, 96\]"),
        ({"hidden": torch.zeros(4, 96)}, r"hidden has shape \[4, 96\]; supported with this batch: \[3, 96\]"),
        ({"hidden": torch.zeros(3, 96, dtype=torch.bfloat16)}, "hidden has dtype torch.bfloat16; supported: torch.float32"),
        ({"k_cache": torch.zeros(2, 64, 1, 512)}, r"k_cache has shape \[2, 64, 1, 512\]; supported: \[pages, page size, 1, 576\]"),
        ({"k_cache": torch.zeros(2, 48, 1, 576)}, "page size is 48; supported: 16, 32 and multiples of 64"),
        ({"k_cache": torch.zeros(2, 64, 1, 576).half()}, "k_cache has dtype torch.float16; supported: torch.float32"),
        ({"k_cache": torch.zeros(2, 64, 1, 576, device="meta")}, "k_cache is on meta; supported: the device of the weights, cpu"),
    ],
)
def test_what_is_refused(change: dict[str, torch.Tensor], message: str) -> None:
    sequences = Sequences.drawn(V3, [3])
    given = {"hidden": sequences.hidden[0], "k_cache": sequences.k_cache, **change}
    with pytest.raises(ValueError, match=message):
        sequences.layer()(given["hidden"], given["k_cache"], sequences.plan([0], 0))


def test_more_heads_than_kernels_take() -> None:
    config = {**V3, "hidden_size": 2, "num_attention_heads": 129, "q_lora_rank": 2}
    sized = MlaConfig.from_hugging_face(config)
    with pytest.raises(ValueError, match="the weights hold 129 heads; supported: up to 128, shard them over ranks"):
        MlaAttention(sized, MlaWeights.from_tensors(checkpoint(config), sized, prefix=PREFIX))
