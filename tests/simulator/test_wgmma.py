"""wgmma operands against CuTe's layouts spelled out, fragments and products against loops."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from cute_mla.simulator import Swizzle, TensorMap
from cute_mla.simulator.numerics import tma, wgmma

CODES = {Swizzle.NONE: 0, Swizzle.B128: 1, Swizzle.B64: 2, Swizzle.B32: 3}
BITS = {Swizzle.NONE: 0, Swizzle.B32: 1, Swizzle.B64: 2, Swizzle.B128: 3}
SMEM = 96 * 1024


def descriptor(start: int, leading: int, stride: int, swizzle: Swizzle) -> int:
    return start >> 4 | (leading >> 4) << 16 | (stride >> 4) << 32 | CODES[swizzle] << 62


def swizzled(address: int, swizzle: Swizzle) -> int:
    """CuTe's Swizzle<b, 4, 3> on a byte address."""
    return address ^ ((address >> 7) & ((1 << BITS[swizzle]) - 1)) << 4


def opcode(n: int, k: int, types: str) -> wgmma.Instruction:
    return wgmma.parse_opcode(f"wgmma.mma_async.sync.aligned.m64n{n}k{k}.{types}")


def bf16(values: np.ndarray) -> np.ndarray:
    return (np.ascontiguousarray(values, np.float32).view(np.uint32) >> 16).astype(np.uint16)


def place(matrix: np.ndarray, address_of: np.ndarray) -> np.ndarray:
    """Return shared memory of NaN patterns with the elements of a matrix (raw unsigned integers) at the given byte addresses."""
    smem = np.full(SMEM, 0xFF, np.uint8)
    for index in np.ndindex(*matrix.shape):
        address = int(address_of[index])
        smem[address : address + matrix.itemsize] = np.frombuffer(matrix[index].tobytes(), np.uint8)
    return smem


def k_major_addresses(base: int, rows: int, k_bytes: int, item: int, swizzle: Swizzle) -> np.ndarray:
    """tile_to_shape of the K-major atom, 8 rows of one span, over (rows, k), rows first."""
    span = tma.SWIZZLE_SPAN[swizzle]
    addresses = np.empty((rows, k_bytes // item), dtype=np.int64)
    for row in range(rows):
        for byte in range(0, k_bytes, item):
            atom = row // 8 + (byte // span) * (rows // 8)
            addresses[row, byte // item] = swizzled(base + atom * 8 * span + (row % 8) * span + byte % span, swizzle)
    return addresses


def k_major_descriptors(base: int, rows: int, k_bytes: int, swizzle: Swizzle) -> tuple[int, ...]:
    """Return one descriptor per 32 bytes of k of that tile."""
    span = tma.SWIZZLE_SPAN[swizzle]
    column = rows * span  # bytes between spans along k
    starts = [base + byte // span * column + byte % span for byte in range(0, k_bytes, 32)]
    leading = column if swizzle is Swizzle.NONE else 16
    return tuple(descriptor(start, leading, 8 * span, swizzle) for start in starts)


@pytest.mark.parametrize("swizzle", list(Swizzle))
@pytest.mark.parametrize(("rows", "base"), [(64, 0), (64, 0x4400), (8, 0x1880), (192, 0x2000)])
@pytest.mark.parametrize("item", [1, 2, 4])
def test_k_major(swizzle: Swizzle, rows: int, base: int, item: int) -> None:
    k_bytes = 128
    codes = np.random.default_rng(rows).integers(0, 126, (rows, k_bytes // item)).astype(f"u{item}")
    dtype = {1: "u8", 2: "bf16", 4: "tf32"}[item]
    raw = codes << 25 if item == 4 else codes
    smem = place(raw.astype(codes.dtype), k_major_addresses(base, rows, k_bytes, item, swizzle))
    expected = {
        1: lambda: codes.astype(np.float32),
        2: lambda: (codes.astype(np.uint32) << 16).view(np.float32),
        4: lambda: raw.astype(np.uint32).view(np.float32),
    }[item]()
    values = k_major_descriptors(base, rows, k_bytes, swizzle)
    together = wgmma.operand_values(wgmma.operand(values, rows), smem, dtype)
    assert np.array_equal(together, expected)
    step = 32 // item
    for i, value in enumerate(values):
        one = wgmma.operand((value,), rows)
        assert np.array_equal(wgmma.operand_values(one, smem, dtype), expected[:, i * step : (i + 1) * step])


@pytest.mark.parametrize("swizzle", list(Swizzle))
@pytest.mark.parametrize(("extent", "base"), [(64, 0), (256, 0x1400), (8, 0x880), (64, 0x2080)])
def test_mn_major(swizzle: Swizzle, extent: int, base: int) -> None:
    """MN-major atoms: 8 k-rows of one span of mn; several atoms along mn, two along k."""
    span = tma.SWIZZLE_SPAN[swizzle]
    along_mn, along_k = 8 * span, 8 * span * max(1, extent * 2 // span) + 1024
    codes = np.random.default_rng(extent).integers(0, 32640, (extent, 16)).astype(np.uint16)
    addresses = np.empty((extent, 16), dtype=np.int64)
    for mn, k in np.ndindex(extent, 16):
        byte = 2 * mn
        addresses[mn, k] = swizzled(base + byte // span * along_mn + byte % span + (k % 8) * span + k // 8 * along_k, swizzle)
    smem = place(codes, addresses)
    first, second = (along_k, along_mn) if swizzle is Swizzle.NONE else (along_mn, along_k)
    where = wgmma.operand((descriptor(base, first, second, swizzle),), extent, mn_major=True)
    expected = (codes.astype(np.uint32) << 16).view(np.float32)
    assert np.array_equal(wgmma.operand_values(where, smem, "bf16"), expected)
    if span < extent * 2 <= 128:  # swapped fields of a larger operand leave this shared memory
        wrong = wgmma.operand((descriptor(base, second, first, swizzle),), extent, mn_major=True)
        assert not np.array_equal(wgmma.operand_values(wrong, smem, "bf16"), expected)


@pytest.mark.parametrize("field", ["leading", "stride", "swizzle", "start", "major"])
def test_wrong_fields_are_seen(field: str) -> None:
    """Each field of the descriptor matters: a wrong one reads something else."""
    codes = np.random.default_rng(9).integers(0, 32640, (64, 16)).astype(np.uint16)
    swizzle = Swizzle.NONE if field == "leading" else Swizzle.B128
    smem = place(codes, k_major_addresses(1024, 64, 32, 2, swizzle))
    start, leading, stride = 1024, 64 * 16, 8 * tma.SWIZZLE_SPAN[swizzle]
    expected = (codes.astype(np.uint32) << 16).view(np.float32)

    def read(start: int, leading: int, stride: int, swizzle: Swizzle, mn_major: bool = False) -> np.ndarray:
        where = wgmma.operand((descriptor(start, leading, stride, swizzle),), 64, mn_major)
        return wgmma.operand_values(where, smem, "bf16")

    assert np.array_equal(read(start, leading, stride, swizzle), expected)
    wrong = {
        "leading": lambda: read(start, leading + 16, stride, swizzle),
        "stride": lambda: read(start, leading, stride // 2, swizzle),
        "swizzle": lambda: read(start, leading, stride, Swizzle.B64),
        "start": lambda: read(start + 128, leading, stride, swizzle),
        "major": lambda: read(start, leading, stride, swizzle, True),
    }[field]()
    assert not np.array_equal(wrong, expected)


def test_one_tile_as_keys_and_as_values() -> None:
    """A cache tile that TMA loads box by box serves as K-major B for q k^T and, transposed, as MN-major B for p v."""
    rng = np.random.default_rng(4)
    cache = bf16(rng.standard_normal((64, 576)))
    values = (cache.astype(np.uint32) << 16).view(np.float32)
    base, address = 2048, 1 << 20
    plan = tma.plan(TensorMap("bf16", address, (576, 64), (1152,), (64, 64), Swizzle.B128))
    smem = np.full(SMEM, 0xFF, np.uint8)
    for j in range(9):
        tma.load_box(plan.place((64 * j, 0), base + 8192 * j), cache.view(np.uint8).reshape(-1), address, smem)
    keys = tuple(descriptor(base + 8192 * (i // 4) + 32 * (i % 4), 16, 1024, Swizzle.B128) for i in range(36))
    assert np.array_equal(wgmma.operand_values(wgmma.operand(keys, 64), smem, "bf16"), values)
    for half in (0, 1):
        steps = tuple(descriptor(base + 32768 * half + 2048 * i, 8192, 1024, Swizzle.B128) for i in range(4))
        got = wgmma.operand_values(wgmma.operand(steps, 256, mn_major=True), smem, "bf16")
        assert np.array_equal(got, values[:, 256 * half : 256 * half + 256].T)


def test_touched_ranges() -> None:
    sparse = wgmma.operand((descriptor(1024, 16, 1024, Swizzle.B128),), 16)  # 32 of each 128 bytes, permuted
    addresses = k_major_addresses(1024, 16, 32, 2, Swizzle.B128)
    touched = {int(a) // 16 for a in addresses.reshape(-1)}
    assert sparse.touched.tolist() == sorted(touched)
    assert {chunk for low, high in sparse.ranges for chunk in range(low // 16, high // 16)} == touched
    tile = wgmma.operand(k_major_descriptors(2048, 64, 128, Swizzle.B128), 64)
    assert tile.ranges == ((2048, 2048 + 64 * 128),)


def test_ranges_outside_shared_memory() -> None:
    where = wgmma.operand((descriptor(2048, 16, 1024, Swizzle.B128),), 64)
    with pytest.raises(ValueError, match=r"0x800 to 0x2800 are not within 0 to 0x2400"):
        where.read(np.zeros(0x2400, np.uint8))
    assert where.read(np.zeros(0x2800, np.uint8)).shape == (64, 2)


def test_descriptor_fields() -> None:
    raw = 0x4000_2040_3001_2ABC
    assert wgmma.decode_descriptor(raw) == (0x2ABC0, 0x30010, 0x20400, Swizzle.B128)
    for bit in (14, 15, 30, 46, 49, 51, 52, 61):
        with pytest.raises(ValueError, match="base offset and reserved bits"):
            wgmma.decode_descriptor(raw | 1 << bit)


@pytest.mark.parametrize("n", [8, 24, 64, 256])
def test_accumulator_registers(n: int) -> None:
    row, column = wgmma.accumulator_map(n, "f32")
    tile = np.random.default_rng(n).standard_normal((64, n)).astype(np.float32)
    registers = wgmma.tile_to_registers(tile, "f32")
    assert registers.shape == row.shape == (n // 2, 128)
    for i in range(n // 2):
        for thread in range(128):
            warp, lane = divmod(thread, 32)
            position = 16 * warp + lane // 4 + 8 * ((i // 2) % 2), 8 * (i // 4) + 2 * (lane % 4) + i % 2
            assert (row[i, thread], column[i, thread]) == position
            assert registers[i, thread] == tile[position].view(np.uint32)
    assert np.array_equal(wgmma.registers_to_tile(registers, n, "f32"), tile)
    assert wgmma.registers_to_tile(registers, n, "s32").dtype == np.int32


@pytest.mark.parametrize("n", [8, 64, 256])
def test_half_accumulator_registers(n: int) -> None:
    row, column = wgmma.accumulator_map(n, "f16")
    tile = np.random.default_rng(n).standard_normal((64, n)).astype(np.float16)
    registers = wgmma.tile_to_registers(tile, "f16")
    assert registers.shape == (n // 4, 128)
    for i in range(n // 4):
        for thread in range(0, 128, 5):
            warp, lane = divmod(thread, 32)
            for half in (0, 1):
                position = 16 * warp + lane // 4 + 8 * (i % 2), 8 * (i // 2) + 2 * (lane % 4) + half
                assert (row[i, thread, half], column[i, thread, half]) == position
                assert registers[i, thread] >> (16 * half) & 0xFFFF == tile[position].view(np.uint16)
    assert np.array_equal(wgmma.registers_to_tile(registers, n, "f16"), tile)


@pytest.mark.parametrize(("dtype", "item"), [("bf16", 2), ("f16", 2), ("tf32", 4), ("u8", 1), ("e4m3", 1)])
def test_a_from_registers(dtype: str, item: int) -> None:
    registers = np.random.default_rng(item).integers(0, 2**32, (4, 128), dtype=np.uint64).astype(np.uint32)
    raw = np.zeros((64, 32 // item), f"u{item}")
    per = 4 // item
    for j in range(4):
        for thread in range(128):
            warp, lane = divmod(thread, 32)
            for h in range(per):
                k = (lane % 4) * per + 4 * per * (j // 2) + h
                raw[16 * warp + lane // 4 + 8 * (j % 2), k] = int(registers[j, thread]) >> (8 * item * h) & ((1 << 8 * item) - 1)
    expected = {
        "bf16": lambda: torch.from_numpy(raw.view(np.int16)).view(torch.bfloat16).float().numpy(),
        "f16": lambda: raw.view(np.float16).astype(np.float32),
        "tf32": lambda: (raw & 0xFFFFE000).view(np.float32),
        "u8": lambda: raw.astype(np.float32),
        "e4m3": lambda: torch.from_numpy(raw).view(torch.float8_e4m3fn).float().numpy(),
    }[dtype]()
    np.testing.assert_array_equal(wgmma.a_from_registers(registers, dtype), expected)


def test_accumulator_relabelled_as_a() -> None:
    """The known identity: a bf16 accumulator fragment, packed in pairs, is the A fragment of the next product."""
    tile = np.random.default_rng(2).integers(-8, 8, (64, 64)).astype(np.float32)
    registers = bf16(wgmma.tile_to_registers(tile, "f32").view(np.float32)).astype(np.uint32)
    packed = registers[0::2] | registers[1::2] << 16
    for step in range(4):
        a = wgmma.a_from_registers(packed[4 * step : 4 * step + 4], "bf16")
        assert np.array_equal(a, tile[:, 16 * step : 16 * step + 16])


def test_products() -> None:
    rng = np.random.default_rng(1)
    a, b = rng.standard_normal((64, 16)).astype(np.float32), rng.standard_normal((64, 16)).astype(np.float32)
    c = rng.standard_normal((64, 64)).astype(np.float32)
    exact = a.astype(np.float64) @ b.T.astype(np.float64)
    form = opcode(64, 16, "f32.bf16.bf16")
    kept = c.copy()
    np.testing.assert_allclose(wgmma.multiply_accumulate(form, a, b, c), exact + c, atol=1e-5)
    np.testing.assert_allclose(wgmma.multiply_accumulate(form, a, b, c, negate=True), c - exact, atol=1e-5)
    np.testing.assert_allclose(wgmma.multiply_accumulate(form, a, b, None), exact, atol=1e-5)
    assert np.array_equal(c, kept)
    half = wgmma.multiply_accumulate(opcode(64, 16, "f16.f16.f16"), a, b, c.astype(np.float16))
    assert half.dtype == np.float16
    np.testing.assert_allclose(half, exact + c.astype(np.float16), rtol=1e-3, atol=2e-3)
    assert not np.allclose(exact.T, exact)  # a b^T is not mistaken for b a^T


@pytest.mark.parametrize("depth", [64, 576])
def test_sums_of_a_row_do_not_depend_on_its_place(depth: int) -> None:
    rng = np.random.default_rng(1)
    a, b = (rng.standard_normal((rows, depth)).astype(np.float16).astype(np.float32) for rows in (64, 256))
    places, columns = rng.permutation(64), rng.permutation(256)
    form = opcode(256, 16, "f32.f16.f16")
    there = wgmma.multiply_accumulate(form, a, b, None)
    assert np.array_equal(wgmma.multiply_accumulate(form, a[places], b[columns], None), there[places][:, columns])


def test_a_discarded_accumulator_is_not_read() -> None:
    a = np.ones((64, 16), np.float32)
    result = wgmma.multiply_accumulate(opcode(8, 16, "f32.bf16.bf16"), a, np.ones((8, 16), np.float32), None)
    assert np.array_equal(result, np.full((64, 8), 16.0))


def test_integer_products() -> None:
    rng = np.random.default_rng(1)
    a, b = rng.integers(0, 256, (64, 320)), rng.integers(-128, 128, (16, 320))
    a[:2], b[:2] = 255, -128  # the largest sums
    c = rng.integers(-(2**31), 2**31, (64, 16)).astype(np.int32)
    exact = a @ b.T + c.astype(np.int64)
    assert (np.abs(exact) >= 2**31).any()
    wrapped = wgmma.multiply_accumulate(opcode(16, 32, "s32.u8.s8"), a.astype(np.float32), b.astype(np.float32), c)
    assert np.array_equal(wrapped, exact.astype(np.int32))
    form = wgmma.parse_opcode("wgmma.mma_async.sync.aligned.m64n16k32.satfinite.s32.u8.s8")
    clamped = wgmma.multiply_accumulate(form, a.astype(np.float32), b.astype(np.float32), c)
    assert np.array_equal(clamped, np.clip(exact, -(2**31), 2**31 - 1))


def test_long_runs_of_integers_are_exact() -> None:
    a, b = np.full((64, 543), 255.0, np.float32), np.full((8, 543), 255.0, np.float32)
    result = wgmma.multiply_accumulate(opcode(8, 32, "s32.u8.u8"), a, b, None)
    assert (result == 543 * 255 * 255).all()  # odd and above 2**24: float32 cannot hold it


def test_opcodes() -> None:
    form = opcode(256, 16, "f32.bf16.bf16")
    assert (form.n, form.k, form.accumulator_registers, form.transposable, form.negatable) == (256, 16, 128, True, True)
    assert opcode(96, 16, "f16.f16.f16").accumulator_registers == 24
    assert not opcode(64, 32, "f32.e4m3.e5m2").transposable
    assert not opcode(64, 8, "f32.tf32.tf32").transposable
    assert not opcode(64, 32, "s32.s8.u8").negatable


@pytest.mark.parametrize(
    "bad",
    [
        "wgmma.mma_async.sync.aligned.m64n12k16.f32.bf16.bf16",
        "wgmma.mma_async.sync.aligned.m64n264k16.f32.bf16.bf16",
        "wgmma.mma_async.sync.aligned.m64n64k32.f32.bf16.bf16",
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.f16",
        "wgmma.mma_async.sync.aligned.m64n64k16.f16.bf16.bf16",
        "wgmma.mma_async.sync.aligned.m64n40k32.s32.s8.s8",
        "wgmma.mma_async.sync.aligned.m64n64k32.f32.s8.s8",
        "wgmma.mma_async.sync.aligned.m64n64k16.satfinite.f32.bf16.bf16",
        "wgmma.mma_async.sp.sync.aligned.m64n64k32.f32.bf16.bf16",
        "wgmma.mma_async.sync.aligned.m64n64k256.s32.b1.b1.and.popc",
    ],
)
def test_unknown_forms_are_refused(bad: str) -> None:
    with pytest.raises(ValueError, match="not supported"):
        wgmma.parse_opcode(bad)
