"""Bad input: each mistake has a ValueError that says what was given and what is supported."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import cute_mla
from cute_mla.spec.arch import ARCHS, SM120
from tests.support.recording_device import RecordingDevice
from tests.support.right_calls import call_of, planned
from tests.support.zero_tensors import ints, zeros

pytestmark = pytest.mark.usefixtures("device")

OPERANDS: list[tuple[str, str, Callable[[], Any], str]] = [
    ("q of rank 3", "q", lambda: zeros(2, 64, 576), r"q has shape \[2, 64, 576\]; supported .*: \[batch, s_q, h_q, 576 or 512 or 320.*\]"),
    ("q of 320 columns", "q", lambda: zeros(2, 1, 64, 320), "head_dim_v is 512; supported: 256"),
    ("q of 512 columns", "q", lambda: zeros(2, 1, 64, 512), r"k_cache has shape \[7, 64, 1, 576\]; supported: .*, h_kv, 512\]"),
    ("q fp32", "q", lambda: torch.zeros(2, 1, 64, 576), r"q has dtype torch.float32; supported: torch.bfloat16, torch.float16"),
    ("q transposed", "q", lambda: zeros(2, 1, 576, 64).mT, r"q has stride 64 along its last dimension .*supported: 1"),
    ("129 heads", "q", lambda: zeros(2, 1, 129, 576), "h_q is 129; supported: 1 to 128"),
    ("heads not divided", "k_cache", lambda: zeros(9, 64, 3, 576), "h_kv is 3 with h_q 64; supported: divisors of h_q"),
    ("cache of rank 3", "k_cache", lambda: zeros(9, 64, 576), r"\[9, 64, 576\]; supported: \[pages, page size, h_kv, 576\]"),
    ("no pages, of 8", "k_cache", lambda: zeros(0, 8, 1, 576), "page size is 8; supported: 16, 32 and multiples of 64"),
    ("pages of 96", "k_cache", lambda: zeros(9, 96, 1, 576), "page size is 96; supported: 16, 32 and multiples of 64"),
    ("cache rows of 578", "k_cache", lambda: zeros(9, 64, 1, 578)[..., :576], r"578, 1\], 1156 bytes along dimension 1; .*16"),
    ("cache expanded", "k_cache", lambda: zeros(1, 64, 1, 576).expand(9, 64, 1, 576), "0 bytes along dimension 0; supported: positive"),
    ("cache at an odd address", "k_cache", lambda: zeros(9, 64, 1, 584)[..., 4:580], "k_cache starts at address .*multiples of 16"),
    ("table of another batch", "block_table", lambda: ints(3, 8), r"block_table has shape \[3, 8\]; supported: \[2, pages per request\]"),
    ("lengths strided", "cache_seqlens", lambda: ints(4)[::2], r"cache_seqlens has shape \[2\] and strides \[2\]; supported: a contiguous"),
    ("lengths a list", "cache_seqlens", lambda: [1, 2], r"cache_seqlens is \[1, 2\]; supported: a torch tensor"),
    ("head_dim_v", "head_dim_v", lambda: 128, "head_dim_v is 128; supported: 512, 256, 1024"),
    ("head_dim_v of other keys", "head_dim_v", lambda: 256, "head_dim_v is 256; supported: 512"),
]  # fmt: skip


@pytest.mark.parametrize(("operand", "make", "said"), [case[1:] for case in OPERANDS], ids=[case[0] for case in OPERANDS])
def test_operands(device: RecordingDevice, operand: str, make: Callable[[], Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        call_of("dense").run(**{operand: make()})
    assert device.launches == []


@pytest.mark.parametrize(("columns", "values"), [(512, 512), (320, 256)])
def test_other_columns_than_576_are_bf16(device: RecordingDevice, columns: int, values: int) -> None:
    with pytest.raises(ValueError, match=f"q has dtype torch.float16 with {columns} columns; supported: torch.bfloat16, as .to"):
        call_of("dense", d_qk=columns, dtype="fp16").run(head_dim_v=values)
    assert device.launches == []


def test_keys_of_1088_columns_are_divided_by_ctas_of_a_cluster(device: RecordingDevice) -> None:
    call_of("dense", d_qk=1088).run(window=512)
    assert device.launches[1].kernel.endswith("d1088_cluster2")


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"h_kv": 2}, r"k_cache has shape \[.*\]: h_kv 2 is not supported on sm120; supported: 1"),
        ({"d_qk": 1088}, r"q has shape .* 1088\]; supported without indices on sm120: \[batch, s_q, h_q, 576 or 512 or 320\]"),
    ],
)
def test_what_rtx_boards_lack_is_refused(fields: dict[str, Any], said: str) -> None:
    with RecordingDevice(SM120).active() as board:
        with pytest.raises(ValueError, match=said):
            call_of("dense", **fields).run()
        assert board.launches == []
        for operands in ("fp8_cache", "fp8"):
            call_of("dense", operands=operands).run()
            assert board.launches.pop(1).kernel == f"dense_decode_sm120_bf16_{operands}_rows64"
            board.launches.clear()


def test_an_e4m3_cache_has_keys_of_576_columns(device: RecordingDevice) -> None:
    call = call_of("dense", d_qk=512)
    with pytest.raises(
        ValueError, match=r"k_cache has dtype torch.float8_e4m3fn with q of 512 columns; supported: torch.bfloat16, or q of 576"
    ):
        call.run(k_cache=call["k_cache"].to(torch.float8_e4m3fn))
    with pytest.raises(ValueError, match=r"kv_format is 'latent' with a k_cache .* supported without indices: None and 'latent_512'"):
        call.run(kv_format="latent")
    assert device.launches == []


OPTIONS: list[tuple[str, dict[str, Any], str]] = [
    ("out of another shape", {"out": zeros(2, 1, 64, 576)}, r"out has shape \[2, 1, 64, 576\]; supported: \[2, 1, 64, 512\]"),
    ("out expanded", {"out": zeros(2, 1, 1, 512).expand(2, 1, 64, 512)}, "out has strides .*elements share memory"),
    ("workspace too small", {"workspace": zeros(10)}, r"workspace has 20 bytes; supported: at least \d+, see workspace_size"),
    ("workspace strided", {"workspace": torch.zeros(10**8 + 2, dtype=torch.uint8)[::2]}, "workspace has shape .* supported: a contiguous"),
    ("workspace at an odd address", {"workspace": torch.zeros(10**8, dtype=torch.uint8)[8:]}, "workspace starts at .*multiples of 16"),
    ("scale beyond fp32", {"softmax_scale": 3e38}, r"softmax_scale is 3e\+38; supported: a positive finite number of fp32"),
    ("scale a tensor", {"softmax_scale": torch.tensor(1.0)}, r"softmax_scale is a tensor of shape \[\]; supported: a positive"),
    ("empty_lse", {"empty_lse": 0.0}, "empty_lse is 0.0; supported: inf and -inf"),
    ("descale_q", {"descale_q": torch.ones(1)}, "descale_q is given with torch.bfloat16; supported: with torch.float8_e4m3fn"),
    ("is_fp8_kvcache", {"is_fp8_kvcache": True}, "is_fp8_kvcache is True with a k_cache of torch.bfloat16; supported without indices"),
    ("tree_mask of 2 words", {"tree_mask": ints(2, 1, 2)}, r"tree_mask has shape \[2, 1, 2\]; supported: \[2, 1, 1\]"),
    ("window beyond 2^30", {"window": (1 << 30) + 1}, "window is 1073741825; supported: an integer, 1 to 1073741824"),
    ("window_sink negative", {"window": 4, "window_sink": -1}, "window_sink is -1; supported: an integer, 0 to"),
    ("window_sink alone", {"window_sink": 4}, "window_sink is 4 without a window; supported: 0"),
    ("window and tree_mask", {"window": 4, "tree_mask": ints(2, 1, 1)}, "window is 4 with a tree_mask: not supported, .*one of them"),
    ("topk_length", {"topk_length": ints(2)}, "topk_length is .*not supported"),
]  # fmt: skip


@pytest.mark.parametrize(("options", "said"), [case[1:] for case in OPTIONS], ids=[case[0] for case in OPTIONS])
def test_options(device: RecordingDevice, options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        call_of("dense").run(**options)
    assert device.launches == []


# For 128 rows of a KV head, which every architecture gives two CTAs, so that 132 SMs make 66 parts.
PLANS: list[tuple[str, tuple[Any, Any], str]] = [
    ("nothing", (None, None), "tile_scheduler_metadata is NoneType, num_splits NoneType; supported: what get_mla_metadata returns"),
    ("one tensor", (ints(66, 8), None), "tile_scheduler_metadata is Tensor, num_splits NoneType; supported"),
    ("schedule and tensor", (cute_mla.get_mla_metadata()[0], ints(3)), "num_splits is given beside a schedule object"),
    ("7 columns", (ints(66, 7), ints(3)), r"tile_scheduler_metadata has shape \[66, 7\]; supported: \[num_sm_parts, 8\]"),
    ("rows of other shapes", (ints(132, 8), ints(3)), "tile_scheduler_metadata has 132 rows; supported: 66"),
    ("splits of another batch", (ints(66, 8), ints(2)), r"num_splits has shape \[2\]; supported: \[3\]"),
]  # fmt: skip


@pytest.mark.parametrize(("plan", "said"), [case[1:] for case in PLANS], ids=[case[0] for case in PLANS])
def test_plans(device: RecordingDevice, plan: tuple[Any, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        call_of("dense", h_q=128).run(**planned(plan))
    assert device.launches == []


METADATA: list[tuple[str, tuple[Any, ...], dict[str, Any], str]] = [
    ("two arguments", (ints(2), 64), {}, "num_heads_k is missing beside cache_seqlens"),
    ("no lengths", (None, 64, 1), {}, "cache_seqlens is None beside other arguments"),
    ("no rows", (ints(2), 0, 1), {}, "num_q_tokens_per_head_k is 0; supported: an integer, 1 or more"),
    ("no KV heads", (ints(2), 64, 0), {}, "num_heads_k is 0, num_heads_q None"),
    ("heads not divided", (ints(2), 64, 3, 64), {}, "num_heads_k is 3, num_heads_q 64: h_kv is 3 with h_q 64; supported: divisors"),
    ("rows not of these heads", (ints(2), 96, 1, 64), {}, "num_q_tokens_per_head_k is 96 with 64 query heads and 1 KV heads"),
    ("topk without heads", (ints(2), 64, 1, None, False, 2048), {}, "num_heads_q is None with topk 2048; supported with topk: 1 to 128"),
    ("topk with KV heads", (ints(2), 64, 2, 64, True, 2048), {}, "num_heads_k is 2.*h_kv is 2; supported with indices: 1"),
    ("topk negative", (ints(2), 64, 1, 64, True, -1), {}, "topk is -1; supported: an integer, 0 to"),
]  # fmt: skip


@pytest.mark.parametrize(("args", "options", "said"), [case[1:] for case in METADATA], ids=[case[0] for case in METADATA])
def test_get_mla_metadata(device: RecordingDevice, args: tuple[Any, ...], options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        cute_mla.get_mla_metadata(*args, **options)
    assert device.launches == []


SIZES: list[tuple[str, str, dict[str, Any], str]] = [
    ("op", "mha", {}, "op is 'mha'; supported: dense_decode, sparse_decode, .*, dense_prefill_backward, indexer_topk$"),
    ("heads", "dense_decode", {"h_q": 200}, "h_q is 200; supported: 1 to 128"),
    ("KV heads", "dense_decode", {"h_kv": 3}, "h_kv is 3 with h_q 64; supported: divisors of h_q"),
    ("invariant without length", "dense_decode", {"batch_invariant": True}, "batch_invariant is True and max_cache_seqlen None"),
    ("length without invariant", "dense_decode", {"max_cache_seqlen": 64}, "batch_invariant is False and max_cache_seqlen 64"),
    ("topk", "dense_decode", {"topk": 64}, "topk is 64; supported with dense_decode: None"),
    ("sparse KV heads", "sparse_decode", {"h_kv": 2}, "h_kv is 2; supported with indices: 1"),
    ("sparse length", "sparse_decode", {"max_cache_seqlen": 64}, "max_cache_seqlen is 64; supported with sparse_decode: None"),
    ("sparse invariant", "sparse_decode", {"batch_invariant": True}, "batch_invariant is True and topk None; supported: topk"),
    ("MHA length", "dense_prefill", {"max_cache_seqlen": 64}, "max_cache_seqlen is 64; supported with dense_prefill: None"),
    ("device", "dense_decode", {"device": "meta"}, "got tensors on meta: supported are CUDA tensors"),
]  # fmt: skip


@pytest.mark.parametrize(("op", "options", "said"), [case[1:] for case in SIZES], ids=[case[0] for case in SIZES])
def test_workspace_size(op: str, options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        cute_mla.workspace_size(op, **{"batch": 2, "s_q": 1, "h_q": 64, "device": "cpu", **options})


SIMULATE: list[tuple[str, dict[str, Any], str]] = [
    ("arch", {"arch": "sm80"}, f"arch is 'sm80'; supported: {', '.join(ARCHS)}"),
    ("sm_count", {"sm_count": 0}, "sm_count is 0; supported: 1 or more"),
    ("schedule", {"schedule": "lucky"}, "schedule 'lucky': supported are round_robin, lazy, random, adversarial"),
    ("on_finding", {"on_finding": "ignore"}, "on_finding is 'ignore'; supported: raise, collect"),
    ("ignored", {"ignored": "poison"}, "ignored is 'poison'; supported: a collection of kinds of findings"),
    ("ignored_number", {"ignored": [1]}, "ignored is .1.; supported: a collection of kinds of findings"),
]  # fmt: skip


@pytest.mark.parametrize(("options", "said"), [case[1:] for case in SIMULATE], ids=[case[0] for case in SIMULATE])
def test_simulate(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said), cute_mla.simulate(**{"arch": "sm90", **options}):
        pass


def test_cpu_tensors_outside_simulate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cute_mla.runtime.current._simulated", type("Empty", (), {"get": staticmethod(lambda: None)}))
    with pytest.raises(
        ValueError, match=r"got CPU tensors: supported are CUDA tensors, and CPU tensors inside `with cute_mla.simulate\(arch\):`"
    ):
        call_of("dense").run()
