"""The table of shared memory and the table of arguments, from which kernels, build and manifest take theirs."""

from __future__ import annotations

from typing import NamedTuple

import pytest

pytest.importorskip("cutlass", reason="the CuTe DSL (build extra) is not installed")

from cutlass import BFloat16, Float32, Int32, Uint8

from cute_mla.kernels.primitives.smem import Array, Barriers, SmemLayout, Table, Tile
from cute_mla.manifest import Barrier
from cute_mla.spec import abi
from cute_mla.spec.abi import Param, ParamKind, params_of

LAYOUT = SmemLayout((
    Array("bytes", Uint8, 3),
    Barriers("ready", 2),
    Tile("keys", BFloat16, (64, 64, 2)),
    Table("factors", Float32, (64, 3)),
    Barriers("free", 1),
    Array("cell", Int32, 1),
))  # fmt: skip


def test_fields_begin_at_multiples_of_their_alignment() -> None:
    # 8-byte barriers behind 3 bytes, tiles at the period of the swizzle, tables at 16 bytes, all else back to back
    assert LAYOUT.offsets() == (0, 8, 1024, 1024 + 16_384, 1024 + 16_384 + 768, 1024 + 16_384 + 776, LAYOUT.nbytes)
    assert LAYOUT.nbytes == 1024 + 16_384 + 768 + 8 + 4


def test_the_manifest_gets_the_barriers_where_they_lie() -> None:
    assert LAYOUT.barriers() == (Barrier("ready", 8, 2), Barrier("free", 1024 + 16_384 + 768, 1))


class Arguments(NamedTuple):
    """One argument of each kind."""

    table: abi.TensorMap
    rows: abi.Pointer
    stride: abi.Int64
    scale: abi.Float32
    count: abi.Int32


def test_parameters_are_the_fields_in_order() -> None:
    assert params_of(Arguments) == (
        Param("table", ParamKind.TENSOR_MAP),
        Param("rows", ParamKind.POINTER),
        Param("stride", ParamKind.INT64),
        Param("scale", ParamKind.FLOAT32),
        Param("count", ParamKind.INT32),
    )
