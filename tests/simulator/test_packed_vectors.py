"""Blackwell's instructions on registers: pairs of f32, mixed precision, three-operand min and max, 8-bit floats and their scales."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tests.simulator.exact import M32, decode
from tests.simulator.packed_vectors import (
    EIGHT,
    MIXED,
    PAIRS,
    SINGLES,
)
from tests.simulator.small_kernels import Kernel, aligned
from tests.simulator.vectors import MODES, check, float_inputs, half_inputs


def pair_inputs(seed: int) -> list[np.ndarray]:
    """Return two f32 in every word."""
    low, high = float_inputs(seed), float_inputs(seed + 10)
    return [a | b << np.uint64(32) for a, b in zip(low, (high[2], high[3], high[0], high[1]), strict=True)]


def same_pair(actual: int, wanted: int) -> bool:
    """Equal, or a NaN where a NaN is wanted, in both halves."""
    pairs = ((actual >> shift & M32, wanted >> shift & M32) for shift in (0, 32))
    return all(a == b or (math.isnan(decode(a, "f32")) and math.isnan(decode(b, "f32"))) for a, b in pairs)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("seed", [1, 2])
def test_pairs(mode: str, seed: int) -> None:
    check(PAIRS, pair_inputs(seed), mode, same=same_pair)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("seed", [1, 2])
def test_singles(mode: str, seed: int) -> None:
    floats = {vector for vector in SINGLES if vector.banks[0] == "r"}
    check(SINGLES, float_inputs(seed), mode, lambda vector: "f32" if vector in floats else "")
    inputs = [half_inputs(seed)[0], *float_inputs(seed)[1:]]
    check(MIXED, inputs, mode, lambda _: "f32")
    check(EIGHT, half_inputs(seed), mode)


def test_every_code() -> None:
    """All pairs of equal 8-bit codes, and every code beside its complement."""
    for start in range(0, 256, 64):
        codes = np.arange(start, start + 64, dtype=np.uint64)
        for word in (codes | codes << np.uint64(8), codes | (codes ^ np.uint64(255)) << np.uint64(8)):
            vectors = [vector for vector in EIGHT if vector.banks in ("rh", "rhh")]
            check(vectors, [word.copy(), word[::-1].copy(), word.copy(), word.copy()], "plain")


def test_a_128_bit_register_is_a_pair() -> None:
    """Loads, moves that swap the halves through one register, and stores, with an undefined half that stays one."""
    body = """
        .reg .b128 %quad<3>, %single;
        ld.param.u64 %rd3, [p1];
        ld.global.b128 %quad1, [%rd3];
        mov.b128 %quad2, %quad1;
        mov.b128 {%rd4, %rd5}, %quad2;
        mov.b128 %single, {%rd5, %rd4};
        mov.b128 {%rd4, %rd5}, {%rd5, %rd4};
        mov.b32 %r1, smem;
        st.shared.b128 [%r1], %single;
        ld.shared.v2.b64 {%rd6, %rd7}, [%r1];
        st.global.v2.b64 [%rd0], {%rd6, %rd7};
        st.global.v2.b64 [%rd0+16], {%rd4, %rd5};
        ld.shared.u64 %rd8, [%r1+16];
        mov.b128 %quad0, {%rd8, %rd4};
        mov.b128 {%rd9, %rd10}, %quad0;
        st.global.b64 [%rd0+32], %rd10;
    """
    source, out = aligned(2, np.uint64), aligned(6, np.uint64)
    source[:] = [0x1111222233334444, 0x5555666677778888]
    assert Kernel(body, smem=64, threads=1).run(out, source).ok
    assert out.tolist() == [int(source[1]), int(source[0])] * 2 + [int(source[1]), 0]
    poisoned = Kernel(body.replace("[%rd0+32], %rd10", "[%rd0+32], %rd9"), smem=64, threads=1).run(out, source)
    assert [finding.kind for finding in poisoned.findings] == ["poison"]
