"""Sparse attention of SGLang over cute_mla: its calls as the record has them, on the simulated device, against attention in fp32."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import cute_mla
from cute_mla import indexer
from cute_mla.cache import dequantise_cache, quantise_cache
from cute_mla.engines import sglang as adapter
from cute_mla.reference import attention
from cute_mla.spec.arch import SM120, Arch
from tests.engines.sglang_parts import SCALE, FlashMlaPlan, Recorded, members, mha_layer, plain
from tests.support.launched import launched_ops

PAGE, TOPK, LATENT = 64, 128, 512


def runner_of(heads: int, fp8: bool, **changes: Any) -> Any:
    """Return a model runner of DeepSeek-V3.2 with this many heads of a rank."""
    sparse = {
        "dsa_kv_cache_store_fp8": fp8,
        "dsa_index_topk": TOPK,
        "kv_cache_dim": 656 if fp8 else 576,
        "physical_page_size": PAGE,
        "num_q_heads": heads,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
    }
    return SimpleNamespace(sparse={**sparse, **changes}, model_config=SimpleNamespace(hf_config=None, hf_text_config=None))


def backend_of(answers: SimpleNamespace, heads: int, fp8: bool = False, **changes: Any) -> Any:
    answers.sparse = True
    adapter.register()
    return answers.factories["cute_mla"](runner_of(heads, fp8, **changes))


def pool_of(fp8: bool) -> tuple[Tensor, Tensor]:
    """Return a pool of 6 pages, its first one NaN, and what its keys are worth, fp32 [slots, 576]."""
    keys = torch.randn(6, PAGE, 1, 576, generator=torch.Generator().manual_seed(2)).bfloat16()
    pool = quantise_cache(keys, "fp8_656").view(torch.uint8) if fp8 else keys.clone()
    worth = dequantise_cache(pool.view(torch.float8_e4m3fn), "fp8_656") if fp8 else keys
    pool[0] = 0xFF if fp8 else torch.nan
    return pool.flatten(0, 1), worth.float().flatten(0, 2)


def chosen_slots(counts: list[int]) -> Tensor:
    """Return int32 [tokens, topk]: this many slots behind the first page, -1 behind the last."""
    draw = torch.Generator().manual_seed(4)
    slots = torch.full((len(counts), TOPK), -1, dtype=torch.int32)
    for row, count in zip(slots, counts, strict=True):
        row[:count] = PAGE + torch.randperm(5 * PAGE, generator=draw)[:count].to(torch.int32)
    return slots


def expected(q: Tensor, worth: Tensor, slots: Tensor) -> Tensor:
    out = torch.zeros(*q.shape[:2], LATENT)
    for token, row in enumerate(slots):
        keys = worth[row[row >= 0].long()][None]
        out[token] = attention(q[token, :, None].float(), keys, keys[..., :LATENT], SCALE, torch.ones(1, keys.shape[1], dtype=torch.bool))[
            0
        ][:, 0]
    return out


def queries(tokens: int, heads: int) -> Tensor:
    return torch.randn(tokens, heads, 576, generator=torch.Generator().manual_seed(3)).bfloat16()


COUNTS = [TOPK, 1, 0, 65, 64]


@pytest.mark.parametrize("heads", [16, 5])
@pytest.mark.parametrize("fp8", [False, True], ids=["16 bits", "656 bytes"])
def test_decode_over_the_pool(arch: Arch, engine: SimpleNamespace, fp8: bool, heads: int) -> None:
    backend, (pool, worth), slots, q = backend_of(engine, heads, fp8), pool_of(fp8), chosen_slots(COUNTS), queries(len(COUNTS), heads)
    layer = Recorded(members("layers.radix_attention", "RadixAttention"), tp_q_head_num=heads, head_dim=576, scaling=SCALE, layer_id=0)
    lengths = torch.tensor(COUNTS, dtype=torch.int32)
    with launched_ops(arch) as ops:
        plan = backend._compute_flashmla_metadata(cache_seqlens=lengths, seq_len_q=1)
        assert isinstance(plan, FlashMlaPlan)
        assert plan.num_splits.shape == (len(COUNTS) + 1,)
        known = members("layers.attention.dsa_backend", "DSAMetadata")
        metadata = Recorded(known, flashmla_metadata=plan, dsa_cache_seqlens_int32=lengths)
        out = backend._forward_flashmla_kv(
            q_all=q, kv_cache=pool, sm_scale=SCALE, v_head_dim=LATENT, layer=layer, metadata=metadata, page_table_1=slots
        )
    assert ops == ["split_plan", "sparse_decode", "combine"]
    assert out.shape == (len(COUNTS), 1, heads, LATENT)
    torch.testing.assert_close(out[:, 0].float(), expected(q, worth, slots), rtol=1e-2, atol=8e-3)


@pytest.mark.parametrize("lengths", [COUNTS, None, [1, 2]], ids=["lengths", "none", "of other rows"])
def test_rows_of_16_bits(arch: Arch, engine: SimpleNamespace, lengths: list[int] | None) -> None:
    """Calls of prefill and decode over pools of 16 bits. Indices behind a length may be anything."""
    backend, (pool, worth), slots, q = backend_of(engine, 8), pool_of(False), chosen_slots(COUNTS), queries(len(COUNTS), 8)
    given = slots.clone()
    if lengths == COUNTS:
        for row, count in zip(given, COUNTS, strict=True):
            row[count:] = 3  # of the page of NaN
    counts = None if lengths is None else torch.tensor(lengths, dtype=torch.int32)
    with launched_ops(arch) as ops:
        out = backend._forward_flashmla_sparse(
            q_all=q, kv_cache=pool, page_table_1=given, sm_scale=SCALE, v_head_dim=LATENT, topk_length=counts, attn_sink=None
        )
    assert ops == ["sparse_prefill"]
    torch.testing.assert_close(out.float(), expected(q, worth, slots), rtol=1e-2, atol=8e-3)


@pytest.mark.parametrize("heads", [16, 2])
def test_sinks_take_their_share(arch: Arch, engine: SimpleNamespace, heads: int) -> None:
    """Hy4: SGLang gives its layers' sinks to backends of names that take rotary columns on their own, and its backend hands them on."""
    backend, (pool, worth), slots, q = backend_of(engine, heads), pool_of(False), chosen_slots(COUNTS), queries(len(COUNTS), heads)
    for phase in ("forward_extend", "forward_decode"):
        assert "attn_sink" in members("layers.attention.dsa_backend", "DeepseekSparseAttnBackend")[phase]
        assert phase not in vars(type(backend))
    sink = torch.linspace(-3, 6, heads)
    with launched_ops(arch) as ops:
        lengths = torch.tensor(COUNTS, dtype=torch.int32)
        out = backend._forward_flashmla_sparse(
            q_all=q, kv_cache=pool, page_table_1=slots, sm_scale=SCALE, v_head_dim=LATENT, topk_length=lengths, attn_sink=sink
        )
    assert ops == ["sparse_prefill"]
    for token, row in enumerate(slots):
        keys = worth[row[row >= 0].long()]
        shares = torch.cat((q[token].float() @ keys.T * SCALE, sink[:, None]), dim=1).softmax(1)[:, :-1]
        torch.testing.assert_close(out[token].float(), shares @ keys[:, :LATENT], rtol=1e-2, atol=8e-3)


def test_short_prefill_attends_to_all_keys(arch: Arch, engine: SimpleNamespace) -> None:
    backend, draw = backend_of(engine, 2), torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(n, 2, d, generator=draw).bfloat16() for n, d in ((9, 192), (75, 192), (75, 128)))
    starts = {"cu_seqlens_q": torch.tensor([0, 5, 9], dtype=torch.int32), "cu_seqlens_k": torch.tensor([0, 70, 75], dtype=torch.int32)}
    known = members("layers.attention.dsa_backend", "DSAMetadata")
    metadata = Recorded(known, **starts, max_seq_len_q=5, max_seq_len_k=70)
    with launched_ops(arch) as ops:
        out = backend._forward_standard_mha(
            q=q.flatten(1), k=k.flatten(1), v=v.flatten(1), layer=mha_layer(192, 128, 2), forward_batch=None, metadata=metadata
        )
    assert ops == ["dense_prefill"]
    wanted = torch.cat((plain(q[:5], k[:70], v[:70], 65)[0], plain(q[5:], k[70:], v[70:], 1)[0]))
    torch.testing.assert_close(out.flatten(1).float(), wanted, rtol=1e-2, atol=5e-3)


def test_registration(engine: SimpleNamespace) -> None:
    backend_of(engine, 16)
    backend_of(engine, 16)
    assert engine.handlers == {"cute_mla": "as dsa"}
    assert engine.split_queries == ["dsa", "cute_mla"]
    utils = "sglang.srt.layers.attention.dsa.utils"
    assert {target: (hook(), kind) for target, (hook, kind) in engine.hooks.items()} == {
        f"{utils}.resolve_fp8_mqa_logits_fn": (indexer.fp8_mqa_logits, "replace"),
        f"{utils}.resolve_fp8_paged_mqa_logits_fn": (indexer.fp8_paged_mqa_logits, "replace"),
        f"{utils}.resolve_paged_mqa_logits_metadata_fn": (indexer.get_paged_mqa_logits_metadata, "replace"),
    }
    for target in engine.hooks:
        module, _, name = target.rpartition(".")
        assert members(module.removeprefix("sglang.srt."), name) == []


@pytest.mark.usefixtures("engine")
def test_what_sglang_calls_takes_what_sglang_gives() -> None:
    from cute_mla.engines.sglang.sparse import CuteMlaSparse

    recorded = members("layers.attention.dsa_backend", "DeepseekSparseAttnBackend")
    ours = {name for name, value in vars(CuteMlaSparse).items() if inspect.isfunction(value)} - {"__init__"}
    assert ours <= recorded.keys()
    for name in ours:
        assert list(inspect.signature(getattr(CuteMlaSparse, name)).parameters) == recorded[name], name


def test_logits_as_sglangs_indexer_calls_them(arch: Arch) -> None:
    """Prefill pads heads to 32 and takes all columns; decode has a row a token and a page table of 64 keys."""
    draw = torch.Generator().manual_seed(5)
    q = torch.randn(3, 32, 128, generator=draw).to(torch.float8_e4m3fn)
    q[:, 16:] = 0
    weights, keys = torch.randn(3, 32, generator=draw), torch.randn(70, 128, generator=draw).to(torch.float8_e4m3fn)
    scales = torch.rand(70, generator=draw)
    ks, ke = torch.tensor([0, 0, 5], dtype=torch.int32), torch.tensor([1, 70, 70], dtype=torch.int32)
    page = torch.zeros(3, PAGE, 1, 132, dtype=torch.uint8)
    values, factors = page.flatten(1).split([PAGE * 128, PAGE * 4], dim=1)
    for block, part in ((2, slice(0, 64)), (1, slice(64, 70))):
        rows = part.stop - part.start
        values[block, : rows * 128] = keys[part].view(torch.uint8).flatten()
        factors[block, : rows * 4] = scales[part].view(torch.uint8)
    table, lengths = torch.tensor([[2, 1]] * 3, dtype=torch.int32), torch.tensor([[1], [70], [64]], dtype=torch.int32)
    with launched_ops(arch) as ops:
        logits = indexer.fp8_mqa_logits(q, (keys, scales), weights, ks, ke, clean_logits=False)
        schedule = indexer.get_paged_mqa_logits_metadata(lengths, PAGE, 132)
        paged = indexer.fp8_paged_mqa_logits(q.unsqueeze(1), page, weights, lengths, table, schedule, 128, clean_logits=False)
    assert ops == ["mqa_logits", "mqa_logits"]
    assert logits.shape == (3, 70)
    assert logits.stride(0) % 4 == 0
    assert torch.equal(paged[1, :70], logits[1])


def test_rtx_boards_decode_a_pool_of_656_bytes(engine: SimpleNamespace) -> None:
    engine.kernel.dsa_prefill_backend = engine.kernel.dsa_decode_backend = "flashmla_kv"
    backend = backend_of(engine, 16, fp8=True)
    (pool, worth), slots, q = pool_of(True), chosen_slots(COUNTS), queries(len(COUNTS), 16)
    layer = Recorded(members("layers.radix_attention", "RadixAttention"), tp_q_head_num=16, head_dim=576, scaling=SCALE, layer_id=0)
    lengths = torch.tensor(COUNTS, dtype=torch.int32)
    with launched_ops(SM120) as ops:
        plan = backend._compute_flashmla_metadata(cache_seqlens=lengths, seq_len_q=1)
        known = members("layers.attention.dsa_backend", "DSAMetadata")
        metadata = Recorded(known, flashmla_metadata=plan, dsa_cache_seqlens_int32=lengths)
        out = backend._forward_flashmla_kv(
            q_all=q, kv_cache=pool, sm_scale=SCALE, v_head_dim=LATENT, layer=layer, metadata=metadata, page_table_1=slots
        )
    assert ops == ["split_plan", "sparse_decode", "combine"]
    torch.testing.assert_close(out[:, 0].float(), expected(q, worth, slots), rtol=1e-2, atol=8e-3)


def test_what_is_refused(engine: SimpleNamespace) -> None:
    with pytest.raises(ValueError, match="keys have 512 columns; supported: 576"):
        backend_of(engine, 16, qk_rope_head_dim=0)
    engine.deterministic = True
    with pytest.raises(ValueError, match=r"--enable-deterministic-inference is given with sparse attention, .*; supported: dense models"):
        backend_of(engine, 16)
    engine.deterministic = False
    engine.kernel.dsa_decode_backend = "trtllm"
    with pytest.raises(ValueError, match="--dsa-decode-backend is trtllm; supported: flashmla_sparse, flashmla_kv"):
        backend_of(engine, 16)
    engine.kernel.dsa_prefill_backend = None
    with pytest.raises(ValueError, match="--dsa-prefill-backend is None; supported: flashmla_sparse, flashmla_kv, flashmla_auto"):
        backend_of(engine, 16)
    engine.kernel = SimpleNamespace(dsa_prefill_backend="flashmla_sparse", dsa_decode_backend="flashmla_sparse")
    engine.parallel.attn_dcp_size = 2
    with pytest.raises(ValueError, match="--dcp-size is 2; supported: 1"):
        backend_of(engine, 16)


def test_plans_have_one_shape_for_all_numbers_of_rows(engine: SimpleNamespace) -> None:
    """SGLang copies a batch's plan into the buffers of the largest captured batch."""
    backend = backend_of(engine, 16)
    with cute_mla.simulate("sm90", 6):
        shapes = {backend._compute_flashmla_metadata(torch.ones(n, dtype=torch.int32), 1).flashmla_metadata.shape for n in (1, 7, 40)}
    assert len(shapes) == 1
