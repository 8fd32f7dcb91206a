"""is_supported: a closed list of names, one answer for each, and the same answer that a call would get."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cute_mla import is_supported
from cute_mla.spec.arch import Arch
from cute_mla.support import FEATURES

GOOD: dict[str, tuple[Any, ...]] = {
    "dtype": ("bf16", "fp16", torch.bfloat16, torch.float16),
    "h_q": (1, 3, 63, 128),
    "h_kv": (1, 8, 128),
    "s_q": (1, 7, 4096),
    "head_dim": (576,),
    "head_dim_v": (512,),
    "page_size": (16, 32, 64, 128, 192, 4096),
    "causal": (False, True),
    "batch_invariant": (False, True),
    "fp8_kvcache": (False,),
    "attn_sink": (False,),
    "extra_cache": (False,),
    "topk_length": (False,),
}
BAD: dict[str, tuple[Any, ...]] = {
    "dtype": ("fp8", torch.float32),
    "h_q": (0, 129, 1.5),
    "h_kv": (0, 129),
    "s_q": (0,),
    "head_dim": (512,),
    "head_dim_v": (128,),
    "page_size": (0, 1, 48, 96, -64),
    "causal": (None,),
    "batch_invariant": (2,),
    "fp8_kvcache": (True,),
    "attn_sink": (True,),
    "extra_cache": (True,),
    "topk_length": (True,),
}


def test_every_feature_is_tested_and_documented() -> None:
    assert set(FEATURES) == set(GOOD) == set(BAD)
    assert is_supported.__doc__ is not None
    assert all(feature in is_supported.__doc__ for feature in FEATURES)


@pytest.mark.parametrize(("feature", "value"), [(feature, value) for feature, values in GOOD.items() for value in values])
def test_supported(feature: str, value: Any, arch: Arch) -> None:
    assert is_supported("dense_decode", arch.name, **{feature: value}) == (True, arch.proof)


@pytest.mark.parametrize(("feature", "value"), [(feature, value) for feature, values in BAD.items() for value in values])
def test_not_supported(feature: str, value: Any, arch: Arch) -> None:
    supported, reason = is_supported("dense_decode", arch.name, **{feature: value})
    assert not supported
    assert "supported: " in reason


def test_features_together() -> None:
    assert is_supported("dense_decode", "sm90", h_q=128, h_kv=2, dtype="fp16", page_size=64)[0]
    assert is_supported("dense_decode", "sm90", h_q=64, h_kv=3) == (False, "h_kv is 3 with h_q 64; supported: divisors of h_q")


def test_what_is_to_come() -> None:
    assert is_supported("sparse_decode", "sm90") == (False, "sparse_decode is not in this version, which has dense_decode")
    assert is_supported("dense_prefill", "sm100")[0] is False


@pytest.mark.parametrize("arch", ["sm90", "sm100"])
def test_what_has_not_run_on_hardware_says_so_and_what_stands_in_for_it(arch: str) -> None:
    supported, reason = is_supported("dense_decode", arch)
    assert supported
    assert f"the kernels for {arch} have not run on hardware; in its stead the PTX behind each cubin runs on the simulated device" in reason


def test_a_b300_is_served_by_the_cubins_of_its_family() -> None:
    assert is_supported("dense_decode", "sm103", h_q=128) == is_supported("dense_decode", "sm100", h_q=128)
    assert is_supported("dense_decode", "sm103", h_q=129)[0] is False


def test_unknown_names() -> None:
    with pytest.raises(ValueError, match="op is 'decode'; supported: dense_decode, "):
        is_supported("decode", "sm90")
    with pytest.raises(ValueError, match="arch is 'hopper'; supported: sm90, sm100, sm103"):
        is_supported("dense_decode", "hopper")
    with pytest.raises(ValueError, match="feature 'windows' is unknown; supported: dtype, h_q, "):
        is_supported("dense_decode", "sm90", windows=True)
