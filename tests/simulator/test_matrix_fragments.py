"""Matrix moves of a warp against loops over lanes and elements, as the PTX manual words them."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from cute_mla.simulator.numerics import matrix_fragments as fragments

WARPS = 3


def memory(seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, 8192, dtype=np.uint8)


def offsets(seed: int, warps: int = WARPS) -> np.ndarray:
    """Return distinct row offsets per lane; lanes beyond what a form uses hold nonsense."""
    return (np.random.default_rng(seed).permutation(512)[: warps * 32].reshape(warps, 32) * 16).astype(np.uint32)


def element(smem: np.ndarray, offset: int, column: int) -> int:
    return int(smem[offset + 2 * column]) | int(smem[offset + 2 * column + 1]) << 8


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("transposed", [False, True])
def test_load(count: int, transposed: bool) -> None:
    smem, where = memory(), offsets(1)
    where[:, 8 * count :] = 3  # unused lanes may hold anything
    registers = fragments.load_matrices(smem, where, count, transposed)
    assert len(registers) == count
    for warp in range(WARPS):
        for matrix in range(count):
            rows = where[warp, 8 * matrix : 8 * matrix + 8]
            for lane in range(32):
                pairs = [(lane // 4, 2 * (lane % 4) + half) for half in (0, 1)]
                if transposed:
                    pairs = [(column, row) for row, column in pairs]
                low, high = (element(smem, int(rows[row]), column) for row, column in pairs)
                assert int(registers[matrix][warp, lane]) == low | high << 16


@pytest.mark.parametrize("count", [1, 2])
def test_load_of_bytes(count: int) -> None:
    """The fragments agree with CuTe's layouts of SM100_U8x8_LDSM_T and SM100_U8x16_LDSM_T, with bytes in the instruction's order."""
    smem, where = memory(7), offsets(8)
    where[:, 16 * count :] = 3
    registers = fragments.load_byte_matrices(smem, where, count)
    assert len(registers) == 2 * count
    for warp in range(WARPS):
        for register, lane, byte in itertools.product(range(2 * count), range(32), range(4)):
            row = where[warp, 16 * (register // 2) + 4 * (lane % 4) + byte]
            wanted = smem[row + lane // 4 + 8 * (register % 2)]
            assert int(registers[register][warp, lane]) >> 8 * byte & 255 == wanted


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("transposed", [False, True])
def test_store_undoes_load(count: int, transposed: bool) -> None:
    source, where = memory(2), offsets(3)
    registers = fragments.load_matrices(source, where, count, transposed)
    target = np.zeros_like(source)
    fragments.store_matrices(target, where, registers, transposed)
    rows = where[:, : 8 * count].reshape(-1).astype(int)
    expected = np.zeros_like(source).reshape(-1, 16)
    expected[rows // 16] = source.reshape(-1, 16)[rows // 16]
    assert np.array_equal(target.reshape(-1, 16), expected)
    if not transposed:
        other = np.zeros_like(source)
        fragments.store_matrices(other, where, registers, True)
        assert not np.array_equal(other, target)


def test_one_warp_without_a_warp_dimension() -> None:
    smem, where = memory(4), offsets(5, 1)
    flat = fragments.load_matrices(smem, where[0], 4, False)
    for alone, stacked in zip(flat, fragments.load_matrices(smem, where, 4, False), strict=True):
        assert alone.shape == (32,)
        assert np.array_equal(alone, stacked[0])


def test_bad_rows() -> None:
    where = offsets(6, 1)[0]
    where[9] += 8
    fragments.load_matrices(memory(), where, 1, False)  # lane 9 is not used
    with pytest.raises(ValueError, match=hex(int(where[9]))):
        fragments.load_matrices(memory(), where, 2, False)
    where[9] = 8192
    with pytest.raises(IndexError):
        fragments.load_matrices(memory(), where, 2, False)
    with pytest.raises(IndexError):
        fragments.store_matrices(memory(), where, [where, where], False)
