"""Boxes of tensor maps against loops over their elements."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch

from cute_mla.simulator import Swizzle, TensorMap
from cute_mla.simulator.numerics import tma

BASE = 0x7F0000001000  # address of byte 0 of the global array; the tensors begin a little further on
SHIFT = {Swizzle.NONE: 0, Swizzle.B32: 1, Swizzle.B64: 2, Swizzle.B128: 3}

MAPS = {
    "paged": TensorMap("bf16", BASE + 64, (576, 20, 3), (1152, 20 * 1152), (64, 8, 1), Swizzle.B128),
    "four": TensorMap("fp16", BASE, (40, 3, 5, 2), (160, 480, 2400), (32, 2, 3, 2), Swizzle.B64),
    "bytes": TensorMap("u8", BASE + 16, (70, 9), (80,), (32, 5), Swizzle.B32),
    "plain": TensorMap("fp32", BASE, (13, 6), (64,), (12, 4)),
    "line": TensorMap("i32", BASE, (100,), (), (16,)),
    "narrow": TensorMap("bf16", BASE, (16, 30), (32,), (16, 16), Swizzle.B128),
    "five": TensorMap("u8", BASE, (16, 2, 3, 2, 3), (16, 48, 160, 400), (16, 2, 2, 1, 2)),
}


def swizzled(address: int, swizzle: Swizzle) -> int:
    """CuTe's Swizzle<b, 4, 3> on a byte address."""
    bits = SHIFT[swizzle]
    return address ^ ((address >> 7) & ((1 << bits) - 1)) << 4


def elements(tensor_map: TensorMap, coordinates: tuple[int, ...], offset: int) -> list[tuple[int, int | None]]:
    """(shared offset, global offset from BASE or None if outside) of each element of a box, in box order."""
    size = tma.ITEM_BYTES[tensor_map.dtype]
    result: list[tuple[int, int | None]] = []
    for number, index in enumerate(product(*(range(extent) for extent in reversed(tensor_map.box)))):
        position = [start + i for start, i in zip(coordinates, reversed(index), strict=True)]
        inside = all(0 <= p < n for p, n in zip(position, tensor_map.dims, strict=True))
        place = tensor_map.address - BASE + sum(p * s for p, s in zip(position, (size, *tensor_map.strides), strict=True))
        result.append((swizzled(offset + number * size, tensor_map.swizzle), place if inside else None))
    return result


def places() -> list[tuple[str, tuple[int, ...], int]]:
    """Return boxes inside, over every edge, at unaligned first coordinates, wholly outside, and at destinations of every alignment."""
    rng = np.random.default_rng(3)
    chosen = [(name, (0,) * len(m.dims), 1024) for name, m in MAPS.items()]
    for name, tensor_map in MAPS.items():
        for _ in range(12):
            coordinates = tuple(int(rng.integers(-b, n + 2)) for n, b in zip(tensor_map.dims, tensor_map.box, strict=True))
            chosen.append((name, coordinates, 128 * int(rng.integers(0, 24))))
    return chosen


def random_bytes(seed: int, size: int = 1 << 17) -> np.ndarray:
    return np.random.default_rng(seed).integers(1, 256, size, dtype=np.uint8)


@pytest.mark.parametrize(("name", "coordinates", "offset"), places())
def test_load_and_store(name: str, coordinates: tuple[int, ...], offset: int) -> None:
    tensor_map = MAPS[name]
    size = tma.ITEM_BYTES[tensor_map.dtype]
    gmem, smem = random_bytes(1), random_bytes(2, 12288)
    box = tma.plan(tensor_map).place(coordinates, offset)
    assert box.nbytes == int(np.prod(tensor_map.box)) * size
    where = elements(tensor_map, coordinates, offset)

    expected = smem.copy()
    for target, source in where:
        expected[target : target + size] = 0 if source is None else gmem[source : source + size]
    loaded = smem.copy()
    tma.load_box(box, gmem, BASE, loaded)
    assert np.array_equal(loaded, expected)

    expected = gmem.copy()
    for source, place in where:
        if place is not None:
            expected[place : place + size] = smem[source : source + size]
    stored, split = gmem.copy(), gmem.copy()
    tma.store_box(box, stored, BASE, smem)
    tma.write_global(box, split, BASE, tma.read_shared(box, smem))
    assert np.array_equal(stored, expected)
    assert np.array_equal(split, expected)

    touched = sorted(target for target, _ in where)
    assert box.smem_range == (touched[0], touched[-1] + size)
    inside = {place + i for _, place in where if place is not None for i in range(size)}
    starts, length = box.gmem_rows()
    assert {int(start) - BASE + i for start in starts for i in range(length)} == inside
    low, high = box.gmem_range
    assert (low - BASE, high - BASE) == (min(inside), max(inside) + 1) if inside else low == high


def test_all_edges_occur() -> None:
    """The random places include each way of a box to lie, and both units."""
    seen = set()
    for name, coordinates, offset in places():
        box = tma.plan(MAPS[name]).place(coordinates, offset)
        kind = "inside" if box.layout.outside is None else "edge" if box.layout.inside.size else "outside"
        seen.add((kind, box.layout.unit == 16))
    assert {("inside", True), ("edge", True), ("edge", False), ("outside", True)} <= seen


def test_a_wrong_swizzle_is_seen() -> None:
    tensor_map = MAPS["paged"]
    results = []
    for swizzle in Swizzle:
        other = TensorMap("bf16", tensor_map.address, tensor_map.dims, tensor_map.strides, (16, 32, 1), swizzle)
        smem = np.zeros(1024, np.uint8)
        tma.load_box(tma.plan(other).place((0, 0, 1), 0), random_bytes(1), BASE, smem)
        results.append(smem.tobytes())
    assert len(set(results)) == 4


def test_swizzle_follows_the_absolute_address() -> None:
    """A box at 128 rather than 1024 starts with the second row of the pattern."""
    tensor_map = TensorMap("bf16", BASE, (64, 8), (128,), (64, 8), Swizzle.B128)
    gmem = random_bytes(1)
    whole, row = np.zeros(1024, np.uint8), np.zeros(1024, np.uint8)
    tma.load_box(tma.plan(tensor_map).place((0, 0), 0), gmem, BASE, whole)
    tma.load_box(tma.plan(TensorMap("bf16", BASE, (64, 8), (128,), (64, 1), Swizzle.B128)).place((0, 1), 128), gmem, BASE, row)
    assert np.array_equal(whole[128:256], row[128:256])
    assert not np.array_equal(row[128:256], gmem[128:256])


def test_fill_of_a_shadow() -> None:
    smem = np.full(1024, 9, np.uint8)
    tma.load_box(tma.plan(MAPS["line"]).place((96,), 128), np.zeros(1 << 17, np.uint8), BASE, smem, fill=1)
    assert smem[128:192].tolist() == [0] * 16 + [1] * 48
    assert set(smem[:128]) | set(smem[192:]) == {9}


@pytest.mark.parametrize(
    ("dtype", "kind"),
    [
        ("bf16", torch.bfloat16),
        ("fp16", torch.float16),
        ("fp32", torch.float32),
        ("fp64", torch.float64),
        ("i32", torch.int32),
        ("u8", torch.uint8),
    ],
)
def test_add(dtype: str, kind: torch.dtype) -> None:
    size = tma.ITEM_BYTES[dtype]
    tensor_map = TensorMap(dtype, BASE, (24, 5), (32 * size,), (16, 4), Swizzle.B32 if size <= 2 else Swizzle.NONE)
    generator = torch.Generator().manual_seed(1)
    tensor = (torch.randn(5, 32, generator=generator) * 100).to(torch.int32 if dtype == "u8" else kind).to(kind)
    added = (torch.randn(4, 16, generator=generator) * 3).to(torch.int32 if dtype == "u8" else kind).to(kind)
    gmem = tensor.view(torch.uint8).numpy().copy().reshape(-1)
    smem = np.zeros(2048, np.uint8)
    raw = added.view(torch.uint8).numpy().reshape(4, 16 * size)
    for row, column in product(range(4), range(16 * size)):
        smem[swizzled(512 + row * 16 * size + column, tensor_map.swizzle)] = raw[row, column]
    tma.add_box(tma.plan(tensor_map).place((12, 2), 512), gmem, BASE, smem)
    tensor[2:5, 12:24] += added[:3, :12]
    assert np.array_equal(gmem, tensor.view(torch.uint8).numpy().reshape(-1))


def test_ranges_are_checked() -> None:
    plan = tma.plan(MAPS["paged"])
    with pytest.raises(ValueError, match="multiple of 128"):
        plan.place((0, 0, 0), 64)
    with pytest.raises(ValueError, match="rank 3"):
        plan.place((0, 0), 0)
    box = plan.place((0, 0, 2), 0)
    with pytest.raises(ValueError, match=r"global bytes 0x7f000000c440"):
        tma.load_box(box, np.zeros(60000, np.uint8)[:50000], BASE, np.zeros(4096, np.uint8))
    with pytest.raises(ValueError, match="global bytes"):
        tma.load_box(box, np.zeros(1 << 17, np.uint8), BASE + (1 << 17), np.zeros(4096, np.uint8))
    with pytest.raises(ValueError, match="shared bytes 0x0 to 0x400 are not within 0 to 0x3f0"):
        tma.load_box(box, np.zeros(1 << 17, np.uint8), BASE, np.zeros(0x3F0, np.uint8))


BAD_MAPS = {
    "dtype": TensorMap("bf17", BASE, (64,), (), (64,)),
    "rank must": TensorMap("bf16", BASE, (64, 2), (), (64, 2)),
    "multiple of 16": TensorMap("bf16", BASE + 8, (64,), (), (64,)),
    r"strides \(24,\)": TensorMap("bf16", BASE, (64, 2), (24,), (64, 2)),
    r"box \(64, 257\)": TensorMap("bf16", BASE, (64, 300), (128,), (64, 257)),
    r"box \(64, 0\)": TensorMap("bf16", BASE, (64, 300), (128,), (64, 0)),
    r"dims \(64, 0\)": TensorMap("bf16", BASE, (64, 0), (128,), (64, 1)),
    "256 bytes exceeds the swizzle span of 128": TensorMap("bf16", BASE, (128, 2), (256,), (128, 2), Swizzle.B128),
    "24 bytes is not a multiple": TensorMap("bf16", BASE, (12, 2), (32,), (12, 2)),
}


@pytest.mark.parametrize(("message", "bad"), BAD_MAPS.items())
def test_bad_maps(message: str, bad: TensorMap) -> None:
    with pytest.raises(ValueError, match=message):
        tma.plan(bad)
    with pytest.raises(ValueError, match=message):
        tma.encode_native_tensor_map(bad)


@pytest.mark.parametrize("name", MAPS)
def test_native_form_round_trip(name: str) -> None:
    raw = tma.encode_native_tensor_map(MAPS[name])
    assert len(raw) == 128
    assert tma.decode_native_tensor_map(raw) == MAPS[name]


def test_native_form_word_by_word() -> None:
    """A paged cache of 2**36 bytes per page pool, against the words spelled out."""
    far = 3 << 36
    tensor_map = TensorMap("bf16", BASE, (576, 64, 1000), (1152, far), (64, 32, 1), Swizzle.B128)
    words = np.frombuffer(tma.encode_native_tensor_map(tensor_map), dtype="<u4")
    assert (int(words[0]) | int(words[1]) << 32) == BASE
    assert int(words[2]) == 2 | 2 << 4 | 10 << 7 | 3 << 13 | 1 << 21
    assert words[3:7].tolist() == [1152 >> 4, (far >> 4) & 0xFFFFFFFF, 0, 0]
    assert int(words[7]) == (far >> 36) << 4
    assert words[8:13].tolist() == [575, 63, 999, 0, 0]
    assert words.tobytes()[52:60] == bytes([0, 0, 0, 63, 31, 0, 0, 0])
    assert not words[15:].any()
    assert tma.decode_native_tensor_map(words.tobytes()) == tensor_map
    small = np.frombuffer(tma.encode_native_tensor_map(MAPS["line"]), dtype="<u4")
    assert int(small[2]) == 2 | 3 << 7


@pytest.mark.parametrize(
    ("byte", "value", "message"),
    [(8, 0x1, "flags"), (9, 0x0D, "flags"), (52, 1, "element strides"), (10, 0x08, "flags"), (9, 0x06, "dtype code 13")],
)
def test_native_forms_that_are_refused(byte: int, value: int, message: str) -> None:
    raw = bytearray(tma.encode_native_tensor_map(MAPS["line"]))
    raw[byte] = value
    with pytest.raises(ValueError, match=message):
        tma.decode_native_tensor_map(bytes(raw))
    with pytest.raises(ValueError, match="127 bytes"):
        tma.decode_native_tensor_map(bytes(raw[:127]))
