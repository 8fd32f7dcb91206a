"""Bad input of sparse decode: each mistake has a ValueError that says what was given and what is supported."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import cute_mla
from cute_mla.ops import sparse_decode
from cute_mla.ops.decode_plan import CommonSpec, Options
from cute_mla.ops.tensor_spec import TensorSpec, spec_of
from cute_mla.spec.cache_format import FORMATS as FORMATS_OF
from cute_mla.spec.dense_decode import MAX_KEYS
from tests.support.recording_device import RecordingDevice
from tests.support.right_calls import planned, sparse_call
from tests.support.zero_tensors import ints, zeros

pytestmark = pytest.mark.usefixtures("device")


def cache(*shape: int) -> torch.Tensor:
    """Return an FP8 cache of zeros."""
    return torch.zeros(*shape, dtype=torch.uint8)


def strided(pages: int, page_size: int, columns: int, page_stride: int, row_stride: int) -> torch.Tensor:
    """Return an FP8 cache with these strides."""
    storage = cache(pages * page_stride + page_size * row_stride + columns)
    return storage.as_strided((pages, page_size, 1, columns), (page_stride, row_stride, row_stride, 1))


FORMATS = r"supported with indices: \[pages, page size, 1, 576\] of bfloat16, float16 with q of 576 columns; .* 656\] of .* 584\] of"

# Of a call with q [2, 1, 64, 576] and k_cache [20, 64, 1, 656].
OPERANDS: list[tuple[str, dict[str, Callable[[], Any]], str]] = [
    ("q of rank 3", {"q": lambda: zeros(2, 64, 576)}, r"q has shape \[2, 64, 576\]; supported with indices: \[batch, s_q, h_q, 576 or 512"),
    ("q of 128 columns", {"q": lambda: zeros(2, 1, 64, 128)}, r"q has shape \[2, 1, 64, 128\]; supported with indices"),
    ("q fp16", {"q": lambda: zeros(2, 1, 64, 576).half()}, r"q has dtype torch.float16; .* as .to\(torch.bfloat16\)"),
    ("129 heads", {"q": lambda: zeros(2, 1, 129, 576)}, "h_q is 129; supported: 1 to 128"),
    ("too many tokens", {"q": lambda: zeros(1, 1, 1, 576).expand(2, 65_536, 1, 576)}, "supported with indices: s_q to 65535"),
    ("656 bytes and 512 columns", {"q": lambda: zeros(2, 1, 64, 512)}, f"shape .* 656.*uint8, q 512 columns; {FORMATS}"),
    ("584 bytes and 576 columns", {"k_cache": lambda: cache(20, 64, 1, 584)}, f"shape .* 584.*uint8, q 576 columns; {FORMATS}"),
    ("cache of 600 bytes", {"k_cache": lambda: cache(20, 64, 1, 600)}, f"shape .* 600.*; {FORMATS}"),
    ("two KV heads", {"k_cache": lambda: cache(20, 64, 2, 656)}, rf"k_cache has shape \[20, 64, 2, 656\] .*; {FORMATS}"),
    ("528 bytes", {"k_cache": lambda: cache(9, 64, 1, 528)}, "and kv_format is None; supported: 'v41', 'v41_paged', 'nope_528'"),
    ("288 bytes", {"k_cache": lambda: cache(9, 64, 1, 288)}, "k_cache has the format v41_fp4, which has no kernels here; .*nope_528$"),
    ("pages without tokens", {"k_cache": lambda: cache(9, 0, 1, 656)}, r"k_cache has shape \[9, 0, .*supported: pages of at"),
    ("pages of 8 more", {"k_cache": lambda: strided(20, 64, 656, 64 * 656 + 8, 656)}, "bytes along dimension 0; supported"),
    ("odd address", {"k_cache": lambda: cache(20 * 64 * 656 + 8)[8:].view(20, 64, 1, 656)}, "k_cache starts at address .*multiples of 16"),
    (
        "584 bytes and a gap",
        {"q": lambda: zeros(2, 1, 64, 512), "k_cache": lambda: strided(20, 64, 584, 64 * 592, 592)},
        "supported: tokens that follow one another without gaps, 584 bytes along dimension 1",
    ),
    (
        "584 bytes, pages of 61",
        {"q": lambda: zeros(2, 1, 64, 512), "k_cache": lambda: cache(20, 61, 1, 584)},
        "35624 bytes along dimension 0; supported: positive multiples of 16 bytes",
    ),
    ("v41", {"k_cache": lambda: cache(9, 64, 1, 528), "kv_format": lambda: "v41"}, f"528.*uint8, q 576 columns; {FORMATS}"),
    (
        "v41_paged and a gap",
        {
            "q": lambda: zeros(2, 1, 64, 512), "kv_format": lambda: "v41_paged",
            "k_cache": lambda: strided(20, 64, 528, 64 * 544, 544),
        },
        "supported: tokens that follow one another without gaps, 528 bytes along dimension 1",
    ),
    (
        "v41 that is v41_paged",
        {"q": lambda: zeros(2, 1, 64, 512), "kv_format": lambda: "v41", "k_cache": lambda: strided(20, 64, 528, 64 * 528, 512)},
        r"512 bytes along dimension 1; supported for v41: at least 528 \(scales behind all rows of a page are v41_paged\)",
    ),
    ("another format", {"kv_format": lambda: "latent"}, "dtype torch.uint8 with kv_format 'latent'; supported: .* 576"),
    ("no format", {"kv_format": lambda: 3}, "kv_format is 3; supported: None, latent, fp8_656"),
    ("latent said to be FP8", {"k_cache": lambda: zeros(20, 64, 1, 576)}, "is_fp8_kvcache is True with k_cache of torch.bfloat16 and 576"),
    ("FP8 not said", {"is_fp8_kvcache": lambda: False}, "is_fp8_kvcache is False with k_cache of torch.uint8 and 656 columns"),
    (
        "latent of another dtype",
        {"k_cache": lambda: zeros(20, 64, 1, 576).half(), "is_fp8_kvcache": lambda: False},
        r"k_cache has dtype torch.float16; supported: torch.bfloat16, as .to\(torch.bfloat16\) gives",
    ),
    ("causal", {"causal": lambda: True}, "causal is True: not supported with indices; supported: False"),
    ("head_dim_v", {"head_dim_v": lambda: 128}, "head_dim_v is 128; supported: 512"),
    ("indices of rank 2", {"indices": lambda: ints(2, 64)}, r"indices has shape \[2, 64\]; supported: \[2, 1, topk\]"),
    ("lengths per token", {"topk_length": lambda: ints(2, 1)}, r"topk_length has shape \[2, 1\]; supported: \[2\]"),
    ("sinks of other heads", {"attn_sink": lambda: torch.zeros(128)}, r"attn_sink has shape \[128\]; supported: \[64\]"),
    ("second cache alone", {"extra_k_cache": lambda: cache(9, 2, 1, 656)}, "extra_indices_in_kvcache is None beside other arguments"),
    ("second indices alone", {"extra_indices_in_kvcache": lambda: ints(2, 1, 64)}, "extra_k_cache is None beside other arguments"),
    ("second lengths alone", {"extra_topk_length": lambda: ints(2)}, "extra_k_cache is None beside other arguments of a second cache"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "said"), [case[1:] for case in OPERANDS], ids=[case[0] for case in OPERANDS])
def test_operands(device: RecordingDevice, change: dict[str, Callable[[], Any]], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        sparse_call().run(**{name: make() for name, make in change.items()})
    assert device.launches == []


# Of a call whose second cache is [20, 2, 1, 656], with 64 indices.
SECOND: list[tuple[str, dict[str, Callable[[], Any]], str]] = [
    ("another format", {"extra_k_cache": lambda: cache(20, 2, 1, 584)}, f"extra_k_cache has shape .* 584.*q 576 columns; {FORMATS}"),
    ("528 bytes", {"extra_k_cache": lambda: cache(9, 2, 1, 528)}, "528 bytes .* extra_kv_format is None; supported: 'v41', "),
    ("e2m1 beside fp8_656", {"extra_k_cache": lambda: cache(9, 2, 1, 288)}, "extra_k_cache has shape .* 288.*q 576 columns"),
    ("a format without kernels", {"extra_kv_format": lambda: "fp8_576"}, "extra_k_cache has the format fp8_576, which has no kernels here"),
    ("a format that does not fit", {"extra_kv_format": lambda: "fp8_584"}, "extra_kv_format 'fp8_584'; supported: .* 584"),
    ("no format", {"extra_kv_format": lambda: "fp4"}, "extra_kv_format is 'fp4'; supported: None, latent, fp8_656"),
    ("other tokens", {"extra_indices_in_kvcache": lambda: ints(2, 2, 64)}, r"indices_in_kvcache has shape \[2, 2, 64\]; supported: \[2, 1"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "said"), [case[1:] for case in SECOND], ids=[case[0] for case in SECOND])
def test_the_second_cache(device: RecordingDevice, change: dict[str, Callable[[], Any]], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        sparse_call(extra_topk=64).run(**{name: make() for name, make in change.items()})
    assert device.launches == []


@pytest.mark.parametrize(
    ("first", "second", "supported"),
    [
        ("nope_528", "v41_fp4", "nope_528"),
        ("nope_528", "v41", "nope_528"),
        ("v41", "nope_528", "v41, v41_paged, v41_fp4"),
        ("v41_paged", "fp8_584", "v41, v41_paged, v41_fp4"),
        ("fp8_584", "v41_fp4", "fp8_584"),
    ],
)
def test_two_formats_that_no_kernel_reads(device: RecordingDevice, first: str, second: str, supported: str) -> None:
    call = sparse_call(cache=first, extra_topk=8)
    extra = cache(20, 2, 1, FORMATS_OF[second].page_bytes(1))
    extra = extra if second != "fp8_584" else strided(20, 2, 584, 1184, 584)
    names = {"kv_format": first, "extra_kv_format": second}
    with pytest.raises(ValueError, match=f"extra_k_cache has the format {second} beside a k_cache of {first}; supported: {supported}$"):
        call.run(extra_k_cache=extra, **names)
    assert device.launches == []


def test_more_indices_than_tiles_are_counted(device: RecordingDevice) -> None:
    call = sparse_call(batch=1, extra_topk=64)
    spec = TensorSpec((1, 1, MAX_KEYS), (MAX_KEYS, MAX_KEYS, 1), torch.int32, call["q"].device)
    indices = spec_of("i", call["extra_indices_in_kvcache"])
    second = sparse_decode.Selection(("a", "b", "c"), spec_of("k", call["k_cache"]), indices, None)
    options = Options(*(None,) * len(Options._fields))._replace(is_fp8_kvcache=True)  # type: ignore[arg-type]
    common = CommonSpec(None, None, None, None, options, address_alignment=16)
    whole = sparse_decode.CallSpec(spec_of("q", call["q"]), second._replace(indices=spec), second, None, None, common)
    with pytest.raises(
        ValueError, match=f"indices and extra_indices_in_kvcache name {MAX_KEYS + 64} slots a token; supported: to {MAX_KEYS}"
    ):
        sparse_decode.plan(whole, device.arch, device.sm_count)


def test_a_plan_of_dense_decode_is_refused_if_its_parts_differ(device: RecordingDevice) -> None:
    """96 rows of one KV head are two CTAs; three tokens of 32 heads are three, or more."""
    metadata = cute_mla.get_mla_metadata(ints(2), 3 * 32, 1, 32)
    with pytest.raises(ValueError, match="tile_scheduler_metadata has 66 rows"):
        sparse_call(s_q=3, h_q=32).run(**planned(metadata))
