"""Keys written to slots and gathered from them."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from cute_mla.cache import gather_latent, write_latent


def empty(pages: int = 3, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """A cache in which a NaN is what was not written."""
    return torch.full((pages, 16, 1, 576), math.nan, dtype=dtype)


def keys(tokens: int, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor]:
    """Latent and rotary columns that tell tokens and columns apart."""
    rows = torch.randn(tokens, 576, generator=torch.Generator().manual_seed(tokens)).to(dtype)
    return rows[:, :512], rows[:, 512:]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("slot_dtype", [torch.int64, torch.int32])
def test_keys_go_to_their_slots_and_nowhere_else(dtype: torch.dtype, slot_dtype: torch.dtype) -> None:
    cache, (kv_c, k_pe) = empty(dtype=dtype), keys(6, dtype)
    slots = [-1, 47, 0, 48, 17, -(2**31)]
    write_latent(cache, kv_c, k_pe, torch.tensor(slots, dtype=slot_dtype))
    expected = empty(dtype=dtype).view(48, 576)
    for token in (1, 2, 4):
        expected[slots[token]] = torch.cat((kv_c[token], k_pe[token]))
    assert torch.equal(cache.view(48, 576).view(torch.int16), expected.view(torch.int16))


@pytest.mark.parametrize("slots", [[], [-1], [-1, 48, -2]])
def test_nothing_is_written(slots: list[int]) -> None:
    cache = empty()
    cache[0, 0] = 2.0  # the place that skipped tokens may look at
    before = cache.clone()
    write_latent(cache, *keys(len(slots)), torch.tensor(slots, dtype=torch.int64))
    assert torch.equal(cache.view(torch.int16), before.view(torch.int16))


def test_keys_that_are_not_finite() -> None:
    """A skipped token's stay out; a written one's are what was given."""
    cache, (kv_c, k_pe) = empty(1), keys(2)
    kv_c[0], k_pe[1, 3] = math.nan, math.inf
    write_latent(cache, kv_c, k_pe, torch.tensor([-1, 4]))
    assert torch.equal(cache[0, 4, 0], torch.cat((kv_c[1], k_pe[1])))
    assert cache[0].isnan().all(dim=-1).sum() == 15


def test_a_cache_of_padded_pages() -> None:
    wide = empty(6)
    cache = wide[1::2]
    write_latent(cache, *keys(1), torch.tensor([40]))
    assert not wide[5, 8].isnan().any()
    assert wide.isnan().all(dim=-1).sum() == 6 * 16 - 1


def test_nothing_is_read_on_the_host() -> None:
    """Tensors without contents are enough: a shape or a branch that depended on slots would raise."""
    cache, (kv_c, k_pe), slots = empty().to("meta"), keys(3), torch.zeros(3, dtype=torch.int64, device="meta")
    with pytest.raises(NotImplementedError):
        slots[slots >= 0]  # as a skip by a mask would do
    write_latent(cache, kv_c.to("meta"), k_pe.to("meta"), slots)
    assert gather_latent(cache, slots).shape == (3, 576)


def test_gathered_in_order() -> None:
    cache, (kv_c, k_pe) = empty(), keys(3)
    slots = torch.tensor([33, 2, 16])
    write_latent(cache, kv_c, k_pe, slots)
    rows = torch.cat((kv_c, k_pe), dim=1)
    assert torch.equal(gather_latent(cache, slots[[2, 0, 1, 0]]), rows[[2, 0, 1, 0]])
    assert gather_latent(cache, slots[:0].int()).shape == (0, 576)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k_cache": torch.zeros(3, 16, 2, 576)}, r"k_cache has shape \[3, 16, 2, 576\]; supported: \[pages, page size, 1, 576\]"),
        ({"k_cache": empty().to(torch.float8_e4m3fn)}, "k_cache has dtype torch.float8_e4m3fn; supported: torch.bfloat16"),
        ({"kv_c": torch.zeros(1, 512).bfloat16()}, r"kv_c has shape \[1, 512\]; supported: \[2, 512\]"),
        ({"k_pe": torch.zeros(2, 64)}, "k_pe has dtype torch.float32; supported: torch.bfloat16"),
        ({"slot_mapping": torch.zeros(2, 1, dtype=torch.int64)}, r"slot_mapping has shape \[2, 1\]; supported: \[tokens\]"),
        ({"slot_mapping": torch.zeros(2)}, "slot_mapping has dtype torch.float32; supported: torch.int64, torch.int32"),
    ],
)
def test_what_is_refused(change: dict[str, Tensor], message: str) -> None:
    kv_c, k_pe = keys(2)
    given = {"k_cache": empty(), "kv_c": kv_c, "k_pe": k_pe, "slot_mapping": torch.tensor([0, 1]), **change}
    with pytest.raises(ValueError, match=message):
        write_latent(**given)
