"""DeepSeek-V4 in SGLang: what its backend calls in the place of FlashMLA, as the record has it, on the simulated device."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from cute_mla.cache import dequantise_cache, empty_cache, quantise_cache
from cute_mla.engines import sglang as adapter
from cute_mla.reference.latent import attend_to_all
from cute_mla.spec.arch import SM120, Arch
from tests.engines.sglang_interface import LATER
from tests.engines.sglang_parts import MODULES
from tests.support.launched import launched_ops

INTERFACE, BACKEND = "sglang.kernels.ops.attention.flash_mla_interface", "sglang.srt.layers.attention.deepseek_v4_backend"
RTX = "sglang.kernels.ops.attention.flash_mla_sm120"
HEADS, COLUMNS, SCALE = 64, 512, 512**-0.5
RUNNER = SimpleNamespace(model_config=SimpleNamespace(hf_config=None))


def served(engine: SimpleNamespace) -> dict[str, Any]:
    """Make the backend, and return what SGLang calls by then, by the name of what it replaces."""
    engine.v4 = True
    adapter.register()
    runner, hooks = engine.factories["cute_mla"](RUNNER)
    assert runner is RUNNER
    assert {kind for _, kind in hooks.values()} == {"replace"}
    return {target: hook for target, (hook, _) in hooks.items()}


def pool_of(kind: str, page: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return a pool of 4 pages as SGLang views it, its first one NaN, and what its keys are worth [slots, 512]."""
    keys = torch.randn(4, page, 1, COLUMNS, generator=torch.Generator().manual_seed(seed)).bfloat16()
    keys[0] = torch.nan
    packed = quantise_cache(keys, kind)
    stride = -(-page * packed.shape[-1] // 576) * 576
    pool = empty_cache(kind, 4, page, page_stride=stride, fill=0xFF)
    pool.copy_(packed.view(torch.uint8))
    return pool, dequantise_cache(packed, kind).float().flatten(0, 2)


def slots_of(counts: list[int], width: int, page: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return int32 [tokens, 1, width], this many slots and -1 behind them, and lengths of at least 1, as SGLang has them."""
    slots = torch.full((len(counts), 1, width), -1, dtype=torch.int32)
    for row, count in enumerate(counts):
        slots[row, 0, :count] = page + torch.randperm(3 * page, generator=torch.Generator().manual_seed(seed + row))[:count].to(torch.int32)
    return slots, torch.tensor(counts, dtype=torch.int32).clamp(min=1)


def a_call(formats: tuple[str, str], page: int = 64, heads: int = HEADS) -> tuple[dict[str, Any], Tensor]:
    """Return what SGLang calls decode with on any device, for three tokens, and what comes out [tokens, 1, heads, 512]."""
    draw, sinks = torch.Generator().manual_seed(7), torch.linspace(-3, 4, heads)
    (pool, worth), (extra, extra_worth) = pool_of(formats[0], page, 1), pool_of(formats[1], 16, 2)
    (slots, lengths), (extra_slots, extra_lengths) = slots_of([64, 1, 17], 64, page, 3), slots_of([40, 0, 0], 64, 16, 4)
    q = torch.randn(3, 1, heads, COLUMNS, generator=draw).bfloat16()
    caches = {"k_cache": pool, "indices": slots, "topk_length": lengths}
    extras = {"extra_k_cache": extra, "extra_indices_in_kvcache": extra_slots, "extra_topk_length": extra_lengths}
    wanted = torch.empty(q.shape)
    for token in range(3):
        named = [(worth, slots[token, 0]), (extra_worth, extra_slots[token, 0])]
        keys = torch.cat([rows[ids[ids >= 0].long()] for rows, ids in named])
        wanted[token, 0] = attend_to_all(q[token, 0].float(), keys, SCALE, sinks)[0]
    return {"q": q, **caches, **extras, "head_dim_v": COLUMNS, "softmax_scale": SCALE, "attn_sink": sinks}, wanted


@pytest.mark.parametrize(
    ("formats", "legacy"),
    [(("fp8_584", "fp8_584"), True), (("v41_paged", "v41_paged"), True), (("v41", "v41"), False), (("v41", "v41_fp4"), False)],
    ids=lambda value: "" if isinstance(value, bool) else value[1],
)
def test_decode_over_two_caches(arch: Arch, engine: SimpleNamespace, formats: tuple[str, str], legacy: bool) -> None:
    calls, (call, wanted) = served(engine), a_call(formats)
    schedule = calls[f"{INTERFACE}.get_mla_metadata"]()[0]
    calls[f"{BACKEND}._maybe_precompute_flashmla_sched_meta"](
        schedule,
        **{name: call[name] for name in ("q", "indices", "topk_length", "extra_topk_length")},
        extra_indices=call["extra_indices_in_kvcache"],
    )
    settled = {"block_table": None, "cache_seqlens": None, "is_fp8_kvcache": True, "use_legacy": legacy}
    given = {**call, **settled, "tile_scheduler_metadata": schedule}
    assert given.keys() <= set(MODULES[INTERFACE]["flash_mla_with_kvcache"])
    with launched_ops(arch) as ops:
        out, _ = calls[f"{INTERFACE}.flash_mla_with_kvcache"](**given)
        calls[f"{INTERFACE}.flash_mla_with_kvcache"](**given)
    assert ops == ["split_plan", *2 * ["sparse_decode", "combine"]]
    torch.testing.assert_close(out.float(), wanted, rtol=1e-2, atol=8e-3)


@pytest.mark.parametrize(("page", "heads"), [(64, 64), (256, 8), (256, 128)])
def test_rtx_boards_decode_and_prefill_by_one_call(engine: SimpleNamespace, page: int, heads: int) -> None:
    """SGLang has pages of 64 or 256 slots there, and gives no schedule."""
    call, wanted = a_call(("fp8_584", "fp8_584"), page, heads)
    with launched_ops(SM120) as ops:
        out, _ = served(engine)[f"{RTX}.flash_mla_with_kvcache_sm120"](**call)
    assert ops == ["split_plan", "sparse_decode", "combine"]
    torch.testing.assert_close(out.float(), wanted, rtol=1e-2, atol=8e-3)


def test_prefill_over_gathered_rows(arch: Arch, engine: SimpleNamespace) -> None:
    draw, sinks = torch.Generator().manual_seed(7), torch.linspace(-3, 4, HEADS)
    rows = torch.randn(100, 1, COLUMNS, generator=draw).bfloat16()
    q, (slots, lengths) = torch.randn(3, HEADS, COLUMNS, generator=draw).bfloat16(), slots_of([64, 1, 17], 64, 25, 3)
    given = {"q": q, "kv": rows, "indices": slots, "sm_scale": SCALE, "d_v": COLUMNS, "attn_sink": sinks, "topk_length": lengths}
    assert given.keys() <= set(MODULES[INTERFACE]["flash_mla_sparse_fwd"])
    with launched_ops(arch) as ops:
        out, _, _ = served(engine)[f"{INTERFACE}.flash_mla_sparse_fwd"](**given)
    assert ops == ["sparse_prefill"]
    for token, ids in enumerate(slots[:, 0]):
        wanted = attend_to_all(q[token].float(), rows[ids[ids >= 0].long(), 0].float(), SCALE, sinks)[0]
        torch.testing.assert_close(out[token].float(), wanted, rtol=1e-2, atol=8e-3)


def test_what_is_replaced_is_recorded(engine: SimpleNamespace) -> None:
    calls = served(engine)
    replaced = {(module, name) for module, _, name in (target.rpartition(".") for target in calls)}
    assert replaced == {(module, name) for module in (INTERFACE, RTX) for name in MODULES[module]} | {
        (BACKEND, name) for name in MODULES[BACKEND] if name not in ("DeepseekV4AttnBackend", "use_dsv4_q8kv8_sparse_prefill")
    }
    assert calls[f"{BACKEND}.can_use_swapab_attention"](*range(6)) is False


def test_keys_of_4_bits_in_the_older_order_are_refused(engine: SimpleNamespace) -> None:
    decode = served(engine)[f"{INTERFACE}.flash_mla_with_kvcache"]
    with pytest.raises(ValueError, match=r"behind all rows of a page; supported: behind each token \(SGLANG_DSV4_KV_LAYOUT=v41_new\)"):
        decode(k_cache=torch.empty(1, 16, 1, 528), extra_k_cache=torch.empty(1, 16, 1, 288), use_legacy=True)


def test_options_that_call_other_kernels_are_refused(engine: SimpleNamespace) -> None:
    for name, value, message in (
        ("dsv4_attn_backend", "flashmla_mega", "--dsv4-attn-backend is flashmla_mega for DeepSeek-V4; supported: flashmla$"),
        ("dsv4_prefill_backend", "flashmla_sparse_q8", "--dsv4-prefill-backend is flashmla_sparse_q8 .*: auto, flashmla_sparse$"),
    ):
        before = getattr(engine.kernel, name)
        setattr(engine.kernel, name, value)
        with pytest.raises(ValueError, match=message):
            served(engine)
        setattr(engine.kernel, name, before)
    engine.deterministic = True
    with pytest.raises(ValueError, match="--enable-deterministic-inference is True for DeepSeek-V4; supported: False"):
        served(engine)
    engine.deterministic, engine.q8_prefill = False, True
    with pytest.raises(ValueError, match="SGLANG_DSV4_Q8KV8_PREFILL, which overrides that option, is True for DeepSeek-V4"):
        served(engine)
    assert engine.hooks == {}


def test_versions_without_the_interface_are_refused(engine: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as without:
        without.delattr(sys.modules[BACKEND], "can_use_swapab_attention")
        with pytest.raises(ValueError, match=f"SGLang has no {BACKEND}.can_use_swapab_attention; DeepSeek-V4 is supported with SGLang 0"):
            served(engine)
    assert engine.hooks == {}
    for name in LATER:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ValueError, match=r"DeepSeek-V4 is supported with SGLang 0\.5\.23"):
        served(engine)
