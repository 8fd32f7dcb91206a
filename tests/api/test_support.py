"""is_supported: a closed list of names, one answer for each, and the same answer that a call would get."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cute_mla import is_supported
from cute_mla.api.support import FEATURES
from cute_mla.ops.limits import BACKWARD_OPS, CACHE_OPS, INDEXER_OPS, OPS, SPARSE_BACKWARD
from cute_mla.spec import sparse_prefill_dq
from cute_mla.spec.arch import Arch

BOTH = (False, True)
HALVES = ("bf16", "fp16", torch.bfloat16, torch.float16)
FLAGS = (
    *("causal", "fp8_kvcache", "attn_sink", "tree_mask", "window", "key_mask"),
    *("extra_cache", "topk_length", "kv_offsets", "cu_seqlens_q"),
)
Values = dict[str, tuple[Any, ...]]


def flags(*names: str, values: tuple[Any, ...] = BOTH) -> Values:
    """Return flags with these values."""
    return dict.fromkeys(names, values)


# What an op takes of features that are not its own, and what it refuses.
PLAIN: Values = {
    **flags(*FLAGS, values=(False,)),
    "batch_invariant": BOTH,
    "indexer_topk": (0,),
    **dict.fromkeys(("page_size", "topk", "kv_format", "extra_kv_format"), (None,)),
}
REFUSED: Values = {
    **flags(*FLAGS, values=(True,)),
    "batch_invariant": (2,),
    **dict.fromkeys(("page_size", "topk", "indexer_topk"), (64,)),
    **dict.fromkeys(("kv_format", "extra_kv_format"), ("latent",)),
}
SPARSE: Values = {
    **PLAIN,
    "dtype": ("bf16", torch.bfloat16),
    "h_q": (1, 3, 63, 128),
    "h_kv": (1,),
    "head_dim": (576, 512),
    "head_dim_v": (512,),
    **flags("attn_sink", "topk_length"),
    "topk": (0, 1, 63, 2048),
}
BAD_SPARSE: Values = {
    **REFUSED,
    "dtype": ("fp8", "fp16", "e4m3", torch.float32),
    "h_q": (0, 129, 1.5),
    "h_kv": (0, 2),
    "head_dim": (128,),
    "head_dim_v": (128,),
    **flags("attn_sink", "topk_length", values=(2,)),
    "topk": (-1, None),
}
DENSE_PREFILL: Values = {
    **PLAIN,
    "dtype": HALVES,
    "h_q": (1, 3, 128, 1000),
    "h_kv": (1, 8, 128, 1000),
    "s_q": (1, 7, 65_536, 2_000_000_000),
    "head_dim": (192, 128, 256),
    "head_dim_v": (128, 256),
    "causal": BOTH,
}
BAD_DENSE_PREFILL: Values = {
    **REFUSED,
    "dtype": ("fp8", "e4m3", torch.float32),
    "h_q": (0, 1 << 31, 1.5),
    **dict.fromkeys(("h_kv", "s_q"), (0, 1 << 31)),
    "head_dim": (64, 512, 576),
    "head_dim_v": (192, 512),
    "causal": (None,),
}
ROWS: Values = {
    **PLAIN,
    "dtype": HALVES,
    **dict.fromkeys(("h_q", "s_q", "head_dim_v"), (None,)),
    "h_kv": (1,),
    "head_dim": (576, 512, 320, 1088),
    "page_size": (1, 2, 61, 64, 4096),
    "fp8_kvcache": BOTH,
    "kv_format": (
        *(None, "latent", "latent_512", "latent_320", "latent_1088", "fp8_576"),
        *("fp8_656", "fp8_584", "v41", "v41_paged", "nope_528"),
    ),
}
BAD_ROWS: Values = {
    **REFUSED,
    "dtype": ("fp8", "e4m3", torch.float32),
    "h_q": (16,),
    "h_kv": (0, 2),
    "s_q": (1,),
    "head_dim": (128,),
    "head_dim_v": (512,),
    "page_size": (0, -64),
    "fp8_kvcache": (None,),
    "kv_format": ("v41_fp4", "fp4"),
}
SELECTION: Values = {
    **dict.fromkeys(FEATURES, (None,)),
    **flags(*FLAGS, values=(False,)),
    "dtype": ("fp32", torch.float32),
    "topk": (0, 2048, 1 << 30),
    "batch_invariant": BOTH,
}
BAD_SELECTION: Values = {
    **dict.fromkeys(FEATURES, (1, "latent")),
    **flags(*FLAGS, values=(True, None)),
    "dtype": ("bf16", torch.float16),
    "topk": (None, -1, 1.5, (1 << 30) + 1),
    "batch_invariant": (None,),
}
SUMS: Values = {
    **SPARSE,
    "s_q": (1, 7, (1 << 31) - 1),
    "kv_offsets": BOTH,
    "head_dim": (576, 512, 128),
    "head_dim_v": (None,),
}
BAD_SUMS: Values = {
    **BAD_SPARSE,
    "s_q": (0, 1 << 31),
    "kv_offsets": (2,),
    "head_dim": (192, 320),
    "head_dim_v": (512, 128),
}
LOGITS: Values = {
    **SELECTION,
    "dtype": ("e4m3", torch.float8_e4m3fn),
    "h_q": (1, 33, 64),
    "h_kv": (1,),
    "s_q": (1, 7, 1 << 24),
    "head_dim": (128,),
    "page_size": (None, 16, 32, 64, 128),
}
BAD_LOGITS: Values = {
    **BAD_SELECTION,
    "dtype": ("fp32", "bf16"),
    "h_q": (0, 65, None),
    "h_kv": (2, None),
    "s_q": (0, None),
    "head_dim": (64, 576),
    "page_size": (8, 48, 256),
}
GOOD: dict[str, Values] = {
    "dense_decode": {
        **PLAIN,
        "dtype": ("bf16", "fp16", "e4m3", torch.bfloat16, torch.float16, torch.float8_e4m3fn),
        "h_q": (1, 3, 63, 128),
        "h_kv": (1, 8, 128),
        "s_q": (1, 7, 4096),
        "head_dim": (576, 512, 320),
        "head_dim_v": (512, 256),
        "page_size": (16, 32, 64, 128, 192, 4096),
        **flags("causal", "fp8_kvcache", "attn_sink", "tree_mask", "window", "cu_seqlens_q"),
        "kv_format": (None, "latent", "fp8_576"),
    },
    "sparse_decode": {
        **SPARSE,
        "s_q": (1, 7, 65_535),
        "page_size": (1, 2, 61, 64, 4096),
        **flags("fp8_kvcache", "extra_cache", "cu_seqlens_q"),
        "kv_format": (None, "latent", "fp8_656", "fp8_584", "v41", "v41_paged", "nope_528"),
        "extra_kv_format": (None, "latent", "fp8_656", "fp8_584", "v41", "v41_paged", "nope_528", "v41_fp4"),
    },
    "dense_prefill": {**DENSE_PREFILL, "key_mask": BOTH},
    "sparse_prefill": {**SPARSE, "s_q": DENSE_PREFILL["s_q"], "kv_offsets": BOTH, "indexer_topk": (0, 1, 65, 2048)},
    **{op: {**DENSE_PREFILL, "dtype": ("bf16", torch.bfloat16)} for op in BACKWARD_OPS},
    SPARSE_BACKWARD: {**SPARSE, "s_q": DENSE_PREFILL["s_q"], "kv_offsets": BOTH},
    **dict.fromkeys(CACHE_OPS, ROWS),
    "cache_insert": {**ROWS, "h_q": (1, 33, 128)},
    **dict.fromkeys(INDEXER_OPS, SELECTION),
    "mqa_logits": {**LOGITS, "topk": (None,)},
    "indexer_topk": LOGITS,
    "index_write": {**LOGITS, "topk": (None,), "dtype": ("bf16", torch.bfloat16), "s_q": (None,)},
    "head_sums": SUMS,
    "indexer_backward": {**SUMS, "h_q": (1, 33, 64), "head_dim": (128,), "attn_sink": (False,)},
}
BAD: dict[str, Values] = {
    "dense_decode": {
        **REFUSED,
        "dtype": ("fp8", torch.float32),
        "h_q": (0, 129, 1.5),
        "h_kv": (0, 129),
        "s_q": (0,),
        "head_dim": (192, 256),
        "head_dim_v": (128,),
        "page_size": (0, 1, 48, 96, -64),
        **flags("causal", "fp8_kvcache", values=(None,)),
        **flags("attn_sink", "tree_mask", "cu_seqlens_q", values=(2,)),
        "window": (128,),
        "kv_format": ("v41", "fp8_656"),
    },
    "sparse_decode": {
        **BAD_SPARSE,
        "s_q": (0, 65_536),
        "page_size": (0, -64),
        "fp8_kvcache": (None,),
        **flags("extra_cache", "cu_seqlens_q", values=(2,)),
        "kv_format": ("v41_fp4", "fp8_576", 528),
        "extra_kv_format": ("fp8_576", "fp4"),
    },
    "dense_prefill": {**BAD_DENSE_PREFILL, "key_mask": (128,)},
    "sparse_prefill": {**BAD_SPARSE, "s_q": (0, 1 << 31), "kv_offsets": (2,), "indexer_topk": (-1, None, True)},
    **dict.fromkeys(BACKWARD_OPS, BAD_DENSE_PREFILL),
    SPARSE_BACKWARD: {**BAD_SPARSE, "s_q": (0, 1 << 31), "kv_offsets": (2,), "indexer_topk": (64, None, True)},
    **dict.fromkeys(CACHE_OPS, BAD_ROWS),
    "cache_insert": {**BAD_ROWS, "h_q": (0, 129, None)},
    **dict.fromkeys(INDEXER_OPS, BAD_SELECTION),
    "mqa_logits": {**BAD_LOGITS, "topk": (64,)},
    "indexer_topk": BAD_LOGITS,
    "index_write": {**BAD_LOGITS, "topk": (64,), "dtype": ("fp16", "e4m3"), "s_q": (1,)},
    "head_sums": BAD_SUMS,
    "indexer_backward": {**BAD_SUMS, "h_q": (0, 65, 1.5), "head_dim": (576, 512), "attn_sink": (True,)},
}


def every(features: dict[str, dict[str, tuple[Any, ...]]]) -> list[tuple[str, str, Any]]:
    """(op, feature, value) of all."""
    return [(op, feature, value) for op, listed in features.items() for feature, values in listed.items() for value in values]


@pytest.mark.parametrize("op", [*OPS, *BACKWARD_OPS, SPARSE_BACKWARD, *CACHE_OPS, *INDEXER_OPS])
def test_every_feature_is_tested_and_documented(op: str) -> None:
    assert set(FEATURES) == set(GOOD[op]) == set(BAD[op])
    assert is_supported.__doc__ is not None
    assert all(feature in is_supported.__doc__ for feature in FEATURES)


@pytest.mark.parametrize(("op", "feature", "value"), every(GOOD))
def test_supported(op: str, feature: str, value: Any, arch: Arch) -> None:
    lacking = op == SPARSE_BACKWARD and not sparse_prefill_dq.closed_variants(arch)
    wanted = (False, f"arch is {arch.name}; supported: sm90") if lacking else (True, arch.proof)
    assert is_supported(op, arch.name, **{feature: value}) == wanted


@pytest.mark.parametrize(("op", "feature", "value"), every(BAD))
def test_not_supported(op: str, feature: str, value: Any, arch: Arch) -> None:
    supported, reason = is_supported(op, arch.name, **{feature: value})
    assert not supported
    assert "supported: " in reason


def test_formats_with_other_features() -> None:
    assert is_supported("cache_write", "sm90", kv_format="v41", dtype="bf16", head_dim=512, fp8_kvcache=True)[0]
    assert is_supported("cache_write", "sm90", kv_format="v41", dtype="fp16") == (
        False,
        "dtype is fp16 with kv_format 'v41'; supported: bf16",
    )
    assert (
        is_supported("cache_gather", "sm100", kv_format="fp8_656", head_dim=512)[1]
        == "head_dim is 512 with kv_format 'fp8_656'; supported: 576"
    )
    refused = is_supported("sparse_decode", "sm90", kv_format="latent", fp8_kvcache=True)
    assert refused == (False, "fp8_kvcache is True with kv_format 'latent'; supported: False")
    assert is_supported("sparse_decode", "sm90", kv_format="fp8_656", dtype="fp16")[1].endswith("supported: 'bf16'")
    assert is_supported("dense_decode", "sm90", kv_format="fp8_576", dtype="fp16")[1].endswith("supported: bf16, e4m3")
    assert is_supported("cache_write", "sm90", kv_format="latent_512", dtype="fp16")[0]
    assert is_supported("cache_insert", "sm90", kv_format="latent", dtype="fp16")[0]
    assert is_supported("cache_insert", "sm90", kv_format="latent_512", dtype="fp16")[1].endswith("supported: bf16")
    refused = is_supported("sparse_decode", "sm90", kv_format="latent", extra_kv_format="fp8_656")
    assert refused == (False, "extra_kv_format is 'fp8_656' with kv_format 'latent'; supported: latent")
    assert is_supported("sparse_decode", "sm90", kv_format="v41_paged", extra_kv_format="v41_fp4", head_dim=512, fp8_kvcache=True)[0]
    assert is_supported("sparse_decode", "sm90", kv_format="v41", extra_kv_format="v41_paged")[0]
    refused = is_supported("sparse_decode", "sm90", kv_format="v41", extra_kv_format="nope_528")
    assert refused == (False, "extra_kv_format is 'nope_528' with kv_format 'v41'; supported: v41, v41_paged, v41_fp4")
    assert is_supported("sparse_decode", "sm90", kv_format="nope_528", extra_kv_format="v41_fp4")[1].endswith("supported: nope_528")
    assert is_supported("dense_decode", "sm90", kv_format="fp8_576", fp8_kvcache=True, dtype="e4m3")[0]


def test_features_together() -> None:
    assert is_supported("dense_decode", "sm90", h_q=128, h_kv=2, dtype="fp16", page_size=64)[0]
    assert is_supported("dense_decode", "sm90", h_q=128, h_kv=1, dtype="e4m3", fp8_kvcache=True)[0]
    assert is_supported("dense_decode", "sm90", h_kv=2, fp8_kvcache=True) == (False, "h_kv is 2 with an FP8 cache; supported: 1")
    assert is_supported("dense_decode", "sm100", head_dim=512, head_dim_v=512, h_kv=2, kv_format="latent_512", fp8_kvcache=False)[0]
    assert is_supported("dense_decode", "sm90", head_dim=320, head_dim_v=256, kv_format="latent_320", dtype="bf16")[0]
    for dtype in ("fp16", torch.float16):
        for columns in ({"head_dim": 320}, {"head_dim": 512, "head_dim_v": 512}, {"head_dim_v": 256}, {"kv_format": "latent_512"}):
            name, value = next(iter(columns.items()))
            refused = is_supported("dense_decode", "sm90", dtype=dtype, **columns)
            assert refused == (False, f"dtype is fp16 with {name} {value!r}; supported: bf16")
    assert is_supported("dense_decode", "sm90", head_dim_v=512, dtype="fp16")[0]
    refused = is_supported("dense_decode", "sm90", head_dim=320, head_dim_v=512)
    assert refused == (False, "head_dim_v is 512 with head_dim 320; supported: 256")
    for features in ({"fp8_kvcache": True}, {"dtype": "e4m3"}):
        refused = is_supported("dense_decode", "sm90", head_dim=512, **features)
        assert refused == (False, "head_dim is 512 with an FP8 cache; supported: 576")
    for dtype in ("e4m3", torch.float8_e4m3fn):
        refused = is_supported("dense_decode", "sm90", dtype=dtype, fp8_kvcache=False)
        assert refused == (False, "dtype is e4m3 without an FP8 cache; supported: bf16, fp16")
    assert is_supported("dense_decode", "sm90", h_q=64, h_kv=3) == (False, "h_kv is 3 with h_q 64; supported: divisors of h_q")


def test_features_of_sparse_decode_together() -> None:
    assert is_supported("sparse_decode", "sm90", fp8_kvcache=True, head_dim=512, dtype="bf16", attn_sink=True, extra_cache=True)[0]
    assert is_supported("sparse_decode", "sm90", fp8_kvcache=False, head_dim=576, dtype=torch.bfloat16)[0]
    for dtype in ("fp16", torch.float16):
        assert is_supported("sparse_decode", "sm90", dtype=dtype)[1].endswith("; supported: 'bf16'")
        refused = is_supported("dense_decode", "sm90", fp8_kvcache=True, dtype=dtype)
        assert refused == (False, "dtype is fp16 with an FP8 cache; supported: bf16, e4m3")
    assert is_supported("sparse_decode", "sm90", fp8_kvcache=False, head_dim=512) == (
        False,
        "head_dim is 512 without an FP8 cache; supported: 576",
    )
    assert is_supported("sparse_decode", "sm90", h_q=64, h_kv=2) == (False, "h_kv is 2; supported: 1")


@pytest.mark.parametrize("head_dim", [576, 512])
def test_features_of_sparse_prefill_together(head_dim: int, arch: Arch) -> None:
    dtype = "bf16"
    options = {"attn_sink": True, "topk_length": True, "kv_offsets": True}
    assert is_supported("sparse_prefill", arch.name, h_q=96, h_kv=1, head_dim=head_dim, dtype=dtype, topk=77, **options)[0]
    assert is_supported("sparse_prefill", arch.name, fp8_kvcache=False, head_dim=head_dim, dtype=dtype)[0]
    assert is_supported("sparse_prefill", arch.name, head_dim=head_dim, dtype=dtype, topk=77, indexer_topk=77)[0]
    refused = is_supported("sparse_prefill", arch.name, head_dim=head_dim, dtype=dtype, topk=77, indexer_topk=78)
    assert refused == (False, "indexer_topk is 78 with topk 77; supported: 0 to topk")


def test_heads_of_256_columns_are_bf16() -> None:
    for columns in ({"head_dim": 256}, {"head_dim_v": 256}):
        ((name, value),) = columns.items()
        refused = is_supported("dense_prefill", "sm90", dtype="fp16", **columns)
        assert refused == (False, f"dtype is fp16 with {name} {value}; supported: bf16")
    assert is_supported(*BACKWARD_OPS, "sm90", dtype="fp16")[1].endswith("; supported: 'bf16'")


@pytest.mark.parametrize(
    ("head_dim", "head_dim_v", "dtype"),
    [(192, 128, "bf16"), (192, 128, "fp16"), (128, 128, "bf16"), (128, 128, "fp16"), (256, 256, "bf16")],
)
def test_features_of_dense_prefill_together(head_dim: int, head_dim_v: int, dtype: str, arch: Arch) -> None:
    heads = {"h_q": 200, "h_kv": 5, "head_dim": head_dim}
    assert is_supported("dense_prefill", arch.name, **heads, head_dim_v=head_dim_v, dtype=dtype, causal=True)[0]
    refused = is_supported("dense_prefill", arch.name, head_dim=head_dim, head_dim_v=384 - head_dim_v)
    assert refused == (False, f"head_dim_v is {384 - head_dim_v} with head_dim {head_dim}; supported: {head_dim_v}")
    masked = is_supported("dense_prefill", arch.name, head_dim=head_dim, dtype=dtype, key_mask=True)
    assert masked[0] == (head_dim_v == 128 and dtype == "bf16")
    assert masked[0] or "with key_mask; supported: " in masked[1]
    refused = is_supported("dense_prefill", arch.name, h_q=40, h_kv=3)
    assert refused == (False, "h_kv is 3 with h_q 40; supported: divisors of h_q")


def test_features_of_an_indexers_training_together() -> None:
    assert is_supported("head_sums", "sm90", head_dim=512, h_q=128, h_kv=1, attn_sink=True, topk=77, batch_invariant=True)[0]
    assert is_supported("head_sums", "sm100", head_dim=128, h_q=64, attn_sink=False, kv_offsets=True)[0]
    refused = is_supported("head_sums", "sm90", head_dim=128, h_q=65)
    assert refused == (False, "h_q is 65 with head_dim 128; supported: 1 to 64")
    refused = is_supported("head_sums", "sm90", head_dim=128, attn_sink=True)
    assert refused == (False, "attn_sink is True with head_dim 128; supported: False")


@pytest.mark.parametrize("op", CACHE_OPS)
def test_features_of_cache_kernels_together(op: str) -> None:
    assert is_supported(op, "sm90", fp8_kvcache=True, head_dim=512, dtype="bf16", page_size=61)[0]
    assert is_supported(op, "sm90", fp8_kvcache=True, dtype="fp16") == (False, "dtype is fp16 with an FP8 cache; supported: bf16")
    assert is_supported(op, "sm90", fp8_kvcache=False, head_dim=512, kv_format="latent_512")[0]
    refused = is_supported(op, "sm90", head_dim=576, kv_format="latent_512")
    assert refused == (False, "head_dim is 576 with kv_format 'latent_512'; supported: 512")


@pytest.mark.parametrize("arch", ["sm90", "sm100"])
def test_what_has_not_run_on_hardware_says_so_and_what_stands_in_for_it(arch: str) -> None:
    supported, reason = is_supported("dense_decode", arch)
    assert supported
    assert f"the kernels for {arch} have not run on hardware; in its stead the PTX behind each cubin runs on the simulated device" in reason


def test_a_b300_is_served_by_the_cubins_of_its_family() -> None:
    assert is_supported("dense_decode", "sm103", h_q=128) == is_supported("dense_decode", "sm100", h_q=128)
    assert is_supported("dense_decode", "sm103", h_q=129)[0] is False


@pytest.mark.parametrize("arch", ["sm80", "sm89", "sm1000"])
def test_architectures_without_kernels_are_an_answer(arch: str) -> None:
    assert is_supported("dense_decode", arch, h_q=16) == (False, f"arch is '{arch}'; supported: sm90, sm100, sm120, sm103, sm121")


def test_an_architecture_without_an_ops_kernels_is_an_answer() -> None:
    assert is_supported("sparse_decode", "sm120", h_q=16, kv_format="fp8_656")[0]
    assert is_supported("sparse_prefill", "sm120", h_q=16, head_dim=512, indexer_topk=64)[0]
    for op in ("mqa_logits", "indexer_topk", "index_write"):
        assert is_supported(op, "sm120")[0]
    for op in ("dense_prefill_backward", "sparse_prefill_backward", "head_sums", "indexer_backward"):
        assert is_supported(op, "sm120") == is_supported(op, "sm121") == (False, f"arch is sm120; supported for {op}: sm90, sm100")


def test_what_dense_decode_on_rtx_boards_lacks_is_an_answer() -> None:
    assert is_supported("dense_decode", "sm120", dtype="fp16", h_kv=1, h_q=128, s_q=3, head_dim=576, tree_mask=True)[0]
    for dtype in ("bf16", "e4m3"):
        assert is_supported("dense_decode", "sm121", dtype=dtype, fp8_kvcache=True)[0]
    refused: dict[str, dict[str, Any]] = {
        "h_kv is 2 on sm120; supported: 1": {"h_kv": 2, "h_q": 4},
        "head_dim is 1088 on sm120; supported: 576, 512, 320": {"head_dim": 1088},
        "head_dim_v is 1024 on sm120; supported: 512, 256": {"head_dim_v": 1024},
    }
    for reason, features in refused.items():
        assert is_supported("dense_decode", "sm120", **features) == (False, reason)
        assert is_supported("dense_decode", "sm90", **features)[0]


def test_unknown_names() -> None:
    with pytest.raises(ValueError, match="op is 'decode'; supported: dense_decode, "):
        is_supported("decode", "sm90")
    with pytest.raises(ValueError, match="arch is 'hopper'; supported: sm90, sm100, sm120, sm103, sm121"):
        is_supported("dense_decode", "hopper")
    with pytest.raises(ValueError, match="arch is 'sm_90a'; supported: sm90, sm100, sm120, sm103, sm121"):
        is_supported("dense_decode", "sm_90a")
    with pytest.raises(ValueError, match="feature 'windows' is unknown"):
        is_supported("dense_decode", "sm80", windows=True)
    with pytest.raises(ValueError, match="feature 'windows' is unknown; supported: dtype, h_q, "):
        is_supported("dense_decode", "sm90", windows=True)


def test_the_answer_names_the_kernels_for_few_heads() -> None:
    few: list[tuple[str, int, dict[str, Any]]] = [("sm90", 16, {"fp8_kvcache": True}), ("sm90", 1, {"kv_format": "v41"})]
    many: list[tuple[str, int, dict[str, Any]]] = [
        ("sm90", 17, {"fp8_kvcache": True}),
        ("sm90", 8, {"kv_format": "latent"}),
        ("sm100", 16, {"fp8_kvcache": True}),
    ]
    many += [("sm90", 8, {"kv_format": "v41", "extra_kv_format": "v41_fp4"}), ("sm90", 8, {})]
    for named, calls in ((True, few), (False, many)):
        for arch, h_q, features in calls:
            supported, status = is_supported("sparse_decode", arch, h_q=h_q, **features)
            assert supported
            assert status.endswith("with keys on M") == named


def test_the_answer_names_the_kernels_for_few_query_rows() -> None:
    few: list[dict[str, Any]] = [{"kv_format": "fp8_576", "h_q": 16}, {"fp8_kvcache": True, "h_q": 8, "s_q": 2}]
    many: list[dict[str, Any]] = [{"kv_format": "fp8_576", "h_q": 17}, {"kv_format": "latent", "h_q": 8}]
    many += [{**few[0], "batch_invariant": True}, {**few[1], "s_q": 3}]
    for named, calls in ((True, few), (False, many)):
        for features in calls:
            supported, status = is_supported("dense_decode", "sm90", dtype="bf16", **features)
            assert supported
            assert status.endswith("with keys on M") == named
