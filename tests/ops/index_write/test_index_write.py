"""write_index_cache and prepare_index_queries: what they compute, launch and refuse."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import cute_mla
from cute_mla.indexer import fp8_paged_mqa_logits, prepare_index_queries, write_index_cache
from cute_mla.ops.index_torch import layer_norm, prepared, transformed
from cute_mla.ops.norm_rope import angles_at
from cute_mla.spec.arch import Arch
from cute_mla.spec.kernel_ops import ARCHS_OF
from cute_mla.testing.runner import SCHEDULES
from tests.support.recording_device import RecordingDevice

PAGE_SIZE, PAGES = 16, 3
FORMS = [(rope, hadamard) for rope in ("half_split", "interleaved") for hadamard in (False, True)]


def table(positions: int = 40, seed: int = 3) -> Tensor:
    """Return cos_sin, fp32 [positions, 64]."""
    angles = 30 * torch.rand(positions, 32, generator=torch.Generator().manual_seed(seed))
    return torch.cat((angles.cos(), angles.sin()), dim=1)


def keys(tokens: int, **changes: Any) -> dict[str, Any]:
    """Return arguments of a call that writes so many keys, some of them changed."""
    draw = torch.Generator().manual_seed(tokens)
    return {
        "k": (2 * torch.randn(tokens, 128, generator=draw) + 0.5).bfloat16(),
        "index_cache": torch.full((PAGES, PAGE_SIZE, 1, 132), 0x55, dtype=torch.uint8),
        "slot_mapping": torch.randperm(PAGES * PAGE_SIZE, generator=draw)[:tokens],
        "norm_weight": torch.randn(128, generator=draw),
        "norm_bias": torch.randn(128, generator=draw),
        "cos_sin": table(),
        "positions": torch.randint(0, 40, (tokens,), generator=draw),
        "rope": "half_split",
        **changes,
    }


def queries(tokens: int = 2, heads: int = 3, **changes: Any) -> dict[str, Any]:
    """Return arguments of a call that prepares queries, some of them changed."""
    draw = torch.Generator().manual_seed(tokens)
    q, weights = torch.randn(tokens, heads, 128, generator=draw).bfloat16(), torch.randn(tokens, heads, generator=draw)
    places = torch.randint(0, 40, (tokens,), generator=draw)
    return {"q": q, "weights": weights, "cos_sin": table(), "positions": places, "rope": "half_split", **changes}


def parts(cache: Tensor) -> tuple[Tensor, Tensor]:
    """Return codes uint8 [slots, 128] and scales uint8 [slots, 4] of a cache."""
    pages, page_size = cache.shape[:2]
    codes, scales = cache.reshape(pages, -1).split((page_size * 128, page_size * 4), dim=1)
    return codes.reshape(-1, 128), scales.reshape(-1, 4)


def written(arguments: dict[str, Any]) -> Tensor:
    """Return the cache that plain torch writes."""
    cache = arguments["index_cache"].clone()
    write_index_cache(**{**arguments, "index_cache": cache})
    return cache


def normed(given: dict[str, Any]) -> Tensor:
    """Return the keys of a call behind LayerNorm, in fp64."""
    weight, bias = given["norm_weight"].double(), given["norm_bias"].double()
    return torch.nn.functional.layer_norm(given["k"].double(), (128,), weight, bias, 1e-6)


def turned(rows: Tensor, angles: Tensor, rope: str) -> Tensor:
    """Rotate columns in fp64, pair by pair."""
    found = rows.double().clone()
    for pair in range(32):
        first, second = (pair, pair + 32) if rope == "half_split" else (2 * pair, 2 * pair + 1)
        cos, sin = angles[:, pair].double(), angles[:, 32 + pair].double()
        found[:, first] = rows[:, first] * cos - rows[:, second] * sin
        found[:, second] = rows[:, second] * cos + rows[:, first] * sin
    return found


@pytest.mark.parametrize(("rope", "hadamard"), FORMS)
def test_the_rule_is_that_of_the_model(rope: Any, hadamard: bool) -> None:
    """Norm, rotation and transformation agree with fp64 written down anew, and so do codes times scales, to half a step of e4m3."""
    given = keys(20)
    angles = given["cos_sin"][given["positions"]]
    expected = turned(normed(given), angles, rope)
    if hadamard:
        signs = torch.tensor([[(-1.0) ** (i & j).bit_count() for j in range(128)] for i in range(128)], dtype=torch.float64)
        expected = expected @ signs * 128**-0.5
    rule = prepared(layer_norm(given["k"], given["norm_weight"], given["norm_bias"], 1e-6), angles, rope, hadamard)
    found = rule.codes.view(torch.float8_e4m3fn).double() * rule.scales.unsqueeze(1)
    assert ((found - expected).abs() <= expected.abs() / 16 * 1.001 + rule.scales.unsqueeze(1) * 2**-9).all()
    amax = expected.abs().amax(dim=1)
    assert torch.equal(rule.scales.log2() % 1, torch.zeros(20))
    assert ((rule.scales * 448 >= amax * 0.9999) & (rule.scales * 224 < amax * 1.0001)).all()


def test_sums_and_the_transformation_are_those_of_torch() -> None:
    rows = torch.randn(50, 128) * 7 + 3
    weight, bias = torch.randn(128), torch.randn(128)
    torch.testing.assert_close(layer_norm(rows, weight, bias, 1e-6), torch.nn.functional.layer_norm(rows, (128,), weight, bias, 1e-6))
    torch.testing.assert_close(transformed(transformed(rows)), rows)


def test_the_least_magnitude() -> None:
    """A key of zeros has the scale of 1e-4, 2^-22, and zeros for values."""
    given = keys(1, norm_weight=torch.zeros(128), norm_bias=torch.zeros(128), slot_mapping=torch.tensor([17]))
    codes, scales = parts(written(given))
    assert (codes[17] & 0x7F).count_nonzero() == 0  # zeros of either sign
    assert scales[17].clone().view(torch.float32).item() == 2.0**-22
    assert parts(written({**given, "scale_format": "ue8m0"}))[1][17].tolist() == [127 - 22] * 4


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("rope", "hadamard"), FORMS)
def test_the_kernels_write_the_bytes_of_torch(arch: Arch, rope: Any, hadamard: bool, schedule: str) -> None:
    k = keys(35)["k"]
    k[3, 100], k[4, 7], k[5], k[6] = math.nan, math.inf, 0.0, 1.5
    places = keys(35)["positions"]
    places[[8, 9, 10]] = torch.tensor([40, -1, 1 << 40])
    slots = keys(35)["slot_mapping"]
    slots[[0, 13, 34]] = torch.tensor([-1, PAGES * PAGE_SIZE, 1 << 33])
    k[0], k[13] = math.nan, math.nan
    for scale_format in ("fp32", "ue8m0"):
        given = keys(35, k=k, positions=places, slot_mapping=slots, rope=rope, hadamard=hadamard, scale_format=scale_format)
        expected = written(given)
        with cute_mla.simulate(arch, schedule=schedule) as device:
            write_index_cache(**given)
        assert device.findings == []
        assert torch.equal(given["index_cache"], expected)
    codes, scales = parts(expected)
    for token in (3, 4, 8, 9, 10):
        assert (codes[slots[token]] == 0x7F).all()
        assert (scales[slots[token]] == 255).all()
    untouched = torch.ones(len(codes), dtype=torch.bool).index_fill(0, slots[(slots >= 0) & (slots < len(codes))], False)
    assert (codes[untouched] == 0x55).all()
    assert (scales[untouched] == 0x55).all()


@pytest.mark.parametrize(("tokens", "heads"), [(1, 1), (3, 5), (2, 64), (9, 7)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernels_prepare_the_queries_of_torch(arch: Arch, tokens: int, heads: int, dtype: torch.dtype) -> None:
    for rope, hadamard in FORMS:
        given = queries(tokens, heads, rope=rope, hadamard=hadamard)
        given["weights"] = given["weights"].to(dtype)
        given["q"][-1, -1, 5] = math.nan
        expected = prepare_index_queries(**given)
        with cute_mla.simulate(arch) as device:
            found = prepare_index_queries(**given)
        assert (device.launches, device.findings) == (1, [])
        assert torch.equal(found[0].view(torch.uint8), expected[0].view(torch.uint8))
        assert torch.equal(found[1].view(torch.int32)[:-1], expected[1].view(torch.int32)[:-1])
        assert found[1][-1, -1].isnan()


@pytest.mark.parametrize("arch", ARCHS_OF["mqa_logits"], ids=lambda arch: arch.name)
def test_logits_of_written_keys_are_those_of_the_model(arch: Arch) -> None:
    """Keys and queries of one form, through cache and logits: within the rounding to e4m3 of logits in fp64."""
    for rope, hadamard in FORMS:
        given = keys(33, slot_mapping=torch.arange(33), rope=rope, hadamard=hadamard)
        asked = queries(1, 8, rope=rope, hadamard=hadamard)
        table_of_pages, length = torch.tensor([[0, 1, 2]], dtype=torch.int32), torch.tensor([33], dtype=torch.int32)
        with cute_mla.simulate(arch):
            write_index_cache(**given)
            q, weights = prepare_index_queries(**asked)
            logits = fp8_paged_mqa_logits(q.unsqueeze(1), given["index_cache"], weights, length, table_of_pages, None, 33)
        rows = turned(normed(given), given["cos_sin"][given["positions"]], rope)
        each = turned(asked["q"][0].double(), asked["cos_sin"][asked["positions"]].expand(8, -1), rope)
        expected = (asked["weights"].double() * (8 * 128) ** -0.5 @ (each @ rows.T).relu()).squeeze(0)
        scale = (asked["weights"].double().abs() * (8 * 128) ** -0.5 @ (each.norm(dim=1)[:, None] * rows.norm(dim=1))).squeeze(0)
        assert ((logits[0] - expected).abs() < scale / 64).all()


def test_what_is_launched(arch: Arch) -> None:
    given, asked = keys(9, positions=None, hadamard=True), queries(3, 5, rope="interleaved")
    given["slot_mapping"] = torch.arange(18, dtype=torch.int32)[::2]
    with RecordingDevice(arch).active() as device:
        write_index_cache(**given, scale_format="ue8m0", eps=0.5)
        prepare_index_queries(**asked)
        write_index_cache(**keys(0))
        prepare_index_queries(**queries(0))
    first, second = device.launches
    assert (first.kernel, first.grid, first.pdl) == (f"index_write_{arch.name}_bf16_keys", (2, 1, 1), True)
    scalars = {
        "rows_stride_token": 128, "slot_stride_token": 2, "codes_stride_first": PAGE_SIZE * 132, "row_count": 9, "heads": 1,
        "table_rows": 40, "slots": PAGES * PAGE_SIZE, "page_size": PAGE_SIZE, "wide_slots": 0, "half_split": 1, "hadamard": 1,
        "exponents": 1, "epsilon": 0.5,
    }  # fmt: skip
    assert {name: first.args[name] for name in scalars} == scalars
    assert (first.args["positions"], first.args["weights"]) == (None, None)
    assert (second.kernel, second.grid) == (f"index_write_{arch.name}_bf16_queries", (2, 1, 1))
    scalars = {"row_count": 15, "heads": 5, "wide_positions": 1, "wide_weights": 1, "half_split": 0, "hadamard": 0}
    assert {name: second.args[name] for name in scalars} == scalars
    assert second.args["factor"] == pytest.approx((5 * 128) ** -0.5, rel=1e-7)


def on_meta(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return arguments without contents."""
    return {name: value.to("meta") if isinstance(value, Tensor) else value for name, value in arguments.items()}


def test_nothing_is_read_on_the_host() -> None:
    """Tensors without contents are enough."""
    write_index_cache(**on_meta(keys(3)))
    prepare_index_queries(**on_meta(queries(3)))


def test_fp32_without_kernels() -> None:
    given, asked = keys(5), queries()
    whole = written({**given, "k": given["k"].float()})
    assert torch.equal(whole, written(given))
    assert torch.equal(prepare_index_queries(**{**asked, "q": asked["q"].float()})[1], prepare_index_queries(**asked)[1])
    with RecordingDevice().active(), pytest.raises(ValueError, match=r"k has dtype torch\.float32; supported: torch\.bfloat16"):
        write_index_cache(**{**given, "k": given["k"].float()})


def misplaced(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return a tensor that starts at no multiple of 16 bytes."""
    return torch.zeros(math.prod(shape) + 1, dtype=dtype)[1:].view(shape)


HUGE = torch.empty(1 << 25, 128, 1, 132, dtype=torch.uint8, device="meta")
BAD_KEYS: dict[str, tuple[dict[str, Any], str]] = {
    "pairs": ({"rope": "neox"}, "rope is 'neox'; supported: 'half_split', 'interleaved'"),
    "scales": ({"scale_format": "e8m0"}, "scale_format is 'e8m0'; supported: 'fp32', 'ue8m0'"),
    "negative eps": ({"eps": -1e-6}, "eps is -1e-06; supported: 0 or a positive number"),
    "columns": ({"k": torch.zeros(2, 64).bfloat16()}, r"k has shape \[2, 64\]; supported: \[tokens, 128\]"),
    "heads of keys": ({"k": torch.zeros(2, 1, 128).bfloat16()}, r"k has shape \[2, 1, 128\]; supported: \[tokens, 128\]"),
    "fp16": ({"k": torch.zeros(2, 128).half()}, "k has dtype torch.float16; supported: torch.bfloat16"),
    "slots": ({"slot_mapping": torch.zeros(3, dtype=torch.int64)}, r"slot_mapping has shape \[3\]; supported with this k: \[2\]"),
    "weight": ({"norm_weight": torch.zeros(64)}, r"norm_weight has shape \[64\]; supported: \[128\]"),
    "table": ({"cos_sin": torch.zeros(40, 32)}, r"cos_sin has shape \[40, 32\]; supported: \[positions, 64\]"),
    "table stride": ({"cos_sin": torch.zeros(40, 65)[:, :64]}, "cos_sin has .* supported: to .* multiples of 4 elements apart"),
    "page size": ({"index_cache": torch.zeros(2, 48, 1, 132).byte()}, "index_cache has shape .*: page size is 48; supported: "),
    "rows": ({"index_cache": torch.zeros(2, 16, 1, 128).byte()}, r"index_cache has shape .* supported: \[pages, page size, 1, 132\]"),
    "pages": ({"index_cache": torch.zeros(2, 16, 1, 140).byte()[..., :132]}, "index_cache has .* supported: contiguous pages"),
    "device": ({"norm_bias": torch.zeros(128, device="meta")}, "norm_bias is on meta; supported: the device of k, cpu"),
    "slots beyond 32 bits": (
        on_meta(keys(2)) | {"index_cache": HUGE},
        f"{1 << 32} slots; supported: to {(1 << 31) - 1}",
    ),
}  # fmt: skip
BAD_QUERIES: dict[str, tuple[dict[str, Any], str]] = {
    "no heads": (queries(1, 0), r"q has shape \[1, 0, 128\]; supported: 1 to 64 heads"),
    "weights": (queries(weights=torch.zeros(2, 4)), r"weights has shape \[2, 4\]; supported with this q: \[2, 3\]"),
    "out stride": (
        queries(out=torch.zeros(2, 3, 136).to(torch.float8_e4m3fn)[..., :128]),
        "out has strides .* supported: multiples of 16 bytes between heads and tokens",
    ),
}


@pytest.mark.parametrize("name", BAD_KEYS)
def test_what_is_refused_of_keys(name: str) -> None:
    changes, message = BAD_KEYS[name]
    with pytest.raises(ValueError, match=message):
        write_index_cache(**keys(2, **changes))


@pytest.mark.parametrize("name", BAD_QUERIES)
def test_what_is_refused_of_queries(name: str) -> None:
    arguments, message = BAD_QUERIES[name]
    with pytest.raises(ValueError, match=message):
        prepare_index_queries(**arguments)


def test_what_only_kernels_refuse() -> None:
    aligned = "starts at address .*; supported: multiples of 16 bytes"
    cache = misplaced(2, 16, 1, 132, dtype=torch.uint8)
    with RecordingDevice().active():
        for changes in ({"norm_weight": misplaced(128)}, {"cos_sin": misplaced(40, 64)}, {"index_cache": cache}):
            with pytest.raises(ValueError, match=f"{next(iter(changes))} {aligned}"):
                write_index_cache(**keys(2, **changes))
        with pytest.raises(ValueError, match=f"out {aligned}"):
            prepare_index_queries(**queries(out=misplaced(2, 3, 128, dtype=torch.uint8).view(torch.float8_e4m3fn)))
        memory = torch.zeros(2, 3, 256, dtype=torch.bfloat16)
        with pytest.raises(ValueError, match="out shares memory with q"):
            prepare_index_queries(**queries(q=memory[..., :128], out=memory.view(torch.float8_e4m3fn)[..., 128:256]))


def test_results_go_to_tensors_of_the_caller(arch: Arch) -> None:
    given = queries(3, 4)
    out, weights = torch.zeros(3, 6, 128).to(torch.float8_e4m3fn), torch.full((3, 9), 7.0)
    with cute_mla.simulate(arch):
        found = prepare_index_queries(**given, out=out[:, 1:5], out_weights=weights[:, 2:6])
        new = prepare_index_queries(**given)
    assert torch.equal(found[0].view(torch.uint8), new[0].view(torch.uint8))
    assert torch.equal(weights[:, 2:6], new[1])
    assert (weights[:, [0, 1, 6, 7, 8]] == 7).all()
    assert out[:, [0, 5]].view(torch.uint8).count_nonzero() == 0


def test_a_position_outside_the_table_is_nan() -> None:
    angles = angles_at(table(4), torch.tensor([3, 4, -1, 1 << 40]), 4)
    assert angles.isnan().all(dim=1).tolist() == [False, True, True, True]
    assert torch.equal(angles_at(table(4), None, 3), table(4)[:3])
