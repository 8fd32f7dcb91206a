"""tcgen05.mma against plain products: where D lies, types, operand layouts, A in tensor memory, masks, scaling."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from cute_mla.simulator import Policy
from tests.simulator.assembled import Evidence, check_machine_code
from tests.simulator.small_kernels import kinds
from tests.simulator.tensor_kernels import (
    FILL,
    PAIR,
    SCHEDULES,
    TensorKernel,
    commit,
    encode,
    fill,
    instruction_descriptor,
    mma,
    place,
    smem_descriptor,
    store_words,
    wait,
)  # fmt: skip

ITEM = {"f16": 2, "bf16": 2, "tf32": 4, "e4m3": 1, "e5m2": 1, "s8": 1, "u8": 1}
KIND = {"f16": "f16", "bf16": "f16", "tf32": "tf32", "e4m3": "f8f6f4", "e5m2": "f8f6f4", "s8": "i8", "u8": "i8"}
CODE = {"f16": 0, "bf16": 1, "tf32": 2, "e4m3": 0, "e5m2": 1, "s8": 1, "u8": 0}


def home(group: int, ws: bool, m: int, n: int) -> np.ndarray:
    """(cta, lane, column) of each element of D, shape (m, n, 3): the data path layouts of the PTX ISA."""
    r, c = np.meshgrid(np.arange(m), np.arange(n), indexing="ij")
    if group == 2 and m == 256:
        parts = (r // 128, r % 128, c)
    elif group == 2:
        parts = (r // 64, r % 64 + 64 * (c >= n // 2), c % (n // 2))
    elif ws and m < 128:
        parts = (0 * r, r + m * (c // (n * m // 128)), c % (n * m // 128))
    elif m == 64:
        parts = (0 * r, r // 16 * 32 + r % 16, c)
    else:
        parts = (0 * r, r, c)
    return np.stack(parts, axis=-1)


def columns_of(group: int, ws: bool, m: int, n: int) -> int:
    return int(home(group, ws, m, n)[..., 2].max()) + 1


def gather(cells: np.ndarray, group: int, ws: bool, m: int, n: int) -> np.ndarray:
    where = home(group, ws, m, n)
    return cells[where[..., 0], where[..., 1], where[..., 2]]


def integers(seed: int, rows: int, depth: int, low: int = -4) -> np.ndarray:
    return np.random.default_rng(seed).integers(low, 5, (rows, depth))


def both_operands(
    a: np.ndarray, b: np.ndarray, dtype: str, group: int, layout: int, majors: tuple[bool, bool] = (False, False)
) -> tuple[np.ndarray, int, int]:
    """Return images of A's and B's rows in each CTA, and the descriptors of the first 32 bytes of k."""
    size = 64 * 1024
    image = np.full((group, size), 0xFF, np.uint8)
    fields = []
    for rank in range(group):
        for matrix, offset, major in ((a, 0, majors[0]), (b, size // 2, majors[1])):
            part = np.split(matrix, group)[rank]
            fields.append(place(image[rank], encode(part, dtype), offset, layout, major))
    return image, smem_descriptor(0, *fields[0], layout), smem_descriptor(size // 2, *fields[1], layout)


@pytest.mark.parametrize(
    ("group", "ws", "m", "n"),
    [
        (1, False, 128, 64), (1, False, 128, 256), (1, False, 64, 8), (1, False, 64, 72), (2, False, 256, 64), (2, False, 256, 48),
        (2, False, 128, 128), (2, False, 128, 256), (1, True, 128, 64), (1, True, 64, 128), (1, True, 32, 64), (1, True, 32, 256),
    ],
)  # fmt: skip
def test_where_d_lies(group: int, ws: bool, m: int, n: int) -> None:
    a, b = integers(1, m, 16), integers(2, n, 16)
    image, first, second = both_operands(a, b, "bf16", group, 6)
    cells = -(-columns_of(group, ws, m, n) // 32) * 32
    program = fill(cells, group) + mma(first, second, instruction_descriptor(m, n), group=group, ws=ws) + commit(group) + wait("$done")
    for policy in SCHEDULES[:2]:
        kernel = TensorKernel(program, group, cells, image.shape[1])
        cells_of, report = kernel.run(image, policy=policy)
        assert not report.findings
        assert np.array_equal(gather(cells_of, group, ws, m, n).view(np.float32), a @ b.T)
        assert np.count_nonzero(cells_of == FILL) == cells_of.size - m * n


LAYOUTS = [
    (dtype, majors, layout)
    for dtype in ITEM
    for majors in ((False, False), (False, True), (True, False))
    for layout in (0, 6, 4, 2, 1)
    if ((layout == 1) == (dtype == "tf32") if any(majors) else layout != 1)  # the others do not exist, or do not matter
]


@pytest.mark.parametrize(("dtype", "majors", "layout"), LAYOUTS)
def test_types_and_operand_layouts(dtype: str, majors: tuple[bool, bool], layout: int) -> None:
    """Two steps of k; the second one advances the descriptors."""
    item = ITEM[dtype]
    depth = 32 // item
    m, n = 128, 64
    low = 0 if dtype == "u8" else -4
    a, b = integers(3, m, 2 * depth, low), integers(4, n, 2 * depth, low)
    size = 64 * 1024
    image = np.full((1, size), 0xFF, np.uint8)
    starts = []
    for matrix, offset, major in ((a, 0, majors[0]), (b, size // 2, majors[1])):
        fields = place(image[0], encode(matrix, dtype), offset, layout, major)
        along_k = {(0, True): fields[0], (0, False): 2 * fields[0]}.get((layout, major))
        if layout and major:
            along_k = fields[1] * depth // (4 if layout == 1 else 8)
        elif layout == 0 and major:
            along_k = fields[0] * depth // 8
        elif layout:
            along_k = 32 if layout != 6 else -(-matrix.shape[0] // 8) * 8 * 32
        starts.append([smem_descriptor(offset + step * int(along_k or 0), *fields, layout) for step in range(2)])
    d = 2 if dtype in ("s8", "u8") else 1
    more = majors[0] << 15 | majors[1] << 16
    idesc = instruction_descriptor(m, n, d, CODE[dtype], CODE[dtype], more)
    program = "".join(mma(starts[0][step], starts[1][step], idesc, accumulate=step, kind=KIND[dtype]) for step in range(2))
    cells, report = TensorKernel(program + commit() + wait("$done"), 1, n, size).run(image)
    assert not report.findings
    got = cells[0].view(np.int32 if d == 2 else np.float32)
    assert np.array_equal(got, a @ b.T)


def test_f16_accumulator_lies_in_the_lower_half() -> None:
    a, b = integers(5, 128, 16), integers(6, 64, 16)
    image, first, second = both_operands(a, b, "f16", 1, 6)
    program = mma(first, second, instruction_descriptor(128, 64, 0, 0, 0)) + commit() + wait("$done")
    cells, report = TensorKernel(program, 1, 64, image.shape[1]).run(image)
    assert not report.findings
    assert np.array_equal(cells[0].astype(np.uint16).view(np.float16), (a @ b.T).astype(np.float16))


@pytest.mark.parametrize("bits", [1 << 13, 1 << 14, 3 << 13])
def test_negation(bits: int) -> None:
    a, b = integers(7, 128, 16), integers(8, 16, 16)
    image, first, second = both_operands(a, b, "bf16", 1, 6)
    program = mma(first, second, instruction_descriptor(128, 16, more=bits)) + commit() + wait("$done")
    cells, _ = TensorKernel(program, 1, 16, image.shape[1]).run(image)
    assert np.array_equal(cells[0].view(np.float32), a @ b.T * (1 if bits == 3 << 13 else -1))


def test_saturation() -> None:
    a = np.full((128, 32), 127)
    b = np.full((64, 32), 127)
    image, first, second = both_operands(a, b, "s8", 1, 6)
    words = np.full((1, 128, 64), 0x7FFFFFF0, np.uint32)
    for saturate in (0, 1):
        idesc = instruction_descriptor(128, 64, 2, 1, 1, saturate << 3)
        program = store_words(64, 64) + mma(first, second, idesc, accumulate=1, kind="i8") + commit() + wait("$done")
        cells, _ = TensorKernel(program, 1, 64, image.shape[1], words=64).run(image, words)
        expected = 0x7FFFFFFF if saturate else (0x7FFFFFF0 + 32 * 127 * 127) % 2**32
        assert (cells == expected).all()


@pytest.mark.parametrize("policy", SCHEDULES)
@pytest.mark.parametrize(("group", "m"), [(1, 128), (2, 256), (2, 128)])
def test_accumulation_over_steps(policy: Policy, group: int, m: int) -> None:
    """Four steps of k on one accumulator, then one on another, under all schedules."""
    n = 64
    a, b = integers(9, m, 64), integers(10, n, 64)
    image, first, second = both_operands(a, b, "bf16", group, 2)
    idesc = instruction_descriptor(m, n)
    program = fill(128, group) + "".join(mma(first + 2 * k, second + 2 * k, idesc, group=group, accumulate=int(k > 0)) for k in range(4))
    program += mma(first, second, idesc, group=group, d=64) + commit(group) + wait("$done")
    cells, report = TensorKernel(program, group, 128, image.shape[1]).run(image, policy=policy)
    assert not report.findings
    assert np.array_equal(gather(cells, group, False, m, n).view(np.float32), a @ b.T)
    assert np.array_equal(gather(cells[..., 64:], group, False, m, n).view(np.float32), a[:, :16] @ b[:, :16].T)


@pytest.mark.parametrize("dtype", ["bf16", "e4m3"])
@pytest.mark.parametrize(
    ("group", "ws", "m"), [(1, False, 128), (1, False, 64), (2, False, 256), (2, False, 128), (1, True, 64), (1, True, 32)]
)
def test_a_in_tensor_memory(group: int, ws: bool, m: int, dtype: str) -> None:
    """Lane l of D takes lane l of A, also where several groups of lanes belong to the same rows: two products in one ("dual GEMM")."""
    n, steps, depth = 128, 3, 32 // ITEM[dtype]
    lanes = integers(11, group * 128, depth * steps)  # A as each lane holds it
    words = encode(lanes, dtype).reshape(group, 128, depth * steps).view(np.uint32)
    b = integers(12, n, depth * steps)
    image = np.full((group, 64 * 1024), 0xFF, np.uint8)
    for rank in range(group):
        fields = place(image[rank], encode(np.split(b, group)[rank], dtype), 0, 2, False)
    second = smem_descriptor(0, *fields, 2)
    idesc = instruction_descriptor(m, n, 1, CODE[dtype], CODE[dtype])
    cells_wide = -(-columns_of(group, ws, m, n) // 32) * 32
    program = store_words(8 * steps, 8 * steps, 256) + fill(cells_wide, group)
    form = {"group": group, "ws": ws, "kind": KIND[dtype]}
    program += "".join(mma(f"{256 + 8 * k}", second + 2 * k, idesc, accumulate=int(k > 0), **form) for k in range(steps))
    kernel = TensorKernel(program + commit(group) + wait("$done"), group, cells_wide, image.shape[1], words=8 * steps)
    cells, report = kernel.run(image, words)
    assert not report.findings
    got = gather(cells, group, ws, m, n).view(np.float32)
    place_of = home(group, ws, m, n)
    a = lanes.reshape(group, 128, -1)[place_of[..., 0], place_of[..., 1]]  # (m, n, k): the A that each element of D sees
    assert np.array_equal(got, np.einsum("mnk,nk->mn", a, b))


def test_m64_at_lane_16() -> None:
    """Two accumulators of M 64 share columns: lanes 0 to 15 and 16 to 31 of each warp."""
    a, b = integers(13, 64, 16), integers(14, 64, 16)
    image, first, second = both_operands(a, b, "bf16", 1, 6)
    idesc = instruction_descriptor(64, 64)
    negated = instruction_descriptor(64, 64, more=1 << 13)
    program = mma(first, second, idesc) + mma(first, second, negated, d=16 << 16) + commit() + wait("$done")
    cells, report = TensorKernel(program, 1, 64, image.shape[1]).run(image)
    assert not report.findings
    quarters = cells[0].view(np.float32).reshape(4, 2, 16, 64)
    assert np.array_equal(quarters[:, 0].reshape(64, 64), a @ b.T)
    assert np.array_equal(quarters[:, 1].reshape(64, 64), -(a @ b.T))


@pytest.mark.parametrize("group", [1, 2])
def test_disabled_lanes_keep_what_they_had(group: int) -> None:
    m, n = 128 * group, 32
    a, b = integers(15, m, 16), integers(16, n, 16)
    image, first, second = both_operands(a, b, "bf16", group, 6)
    words = np.random.default_rng(0).integers(0, 2**31, (group, 128, n)).astype(np.uint32)
    masks = [0xFFFF0000, 0, 0x1, 0xFFFFFFFF, 0, 0x80000000, 0, 0][: 4 * group]
    setup = "".join(f"mov.u32 %r{40 + i}, {value};\n" for i, value in enumerate(masks))
    mask = "{" + ", ".join(f"%r{40 + i}" for i in range(len(masks))) + "}, "
    program = store_words(n, n) + (PAIR if group == 2 else "") + setup
    program += mma(first, second, instruction_descriptor(m, n), group=group, mask=mask) + commit(group) + wait("$done")
    cells, report = TensorKernel(program, group, n, image.shape[1], words=n).run(image, words)
    assert not report.findings
    off = np.array([[masks[4 * rank + lane // 32] >> lane % 32 & 1 for lane in range(128)] for rank in range(group)], bool)
    expected = (a @ b.T).astype(np.float32).view(np.uint32).reshape(group, 128, n)
    assert np.array_equal(cells, np.where(off[..., None], words, expected))


def test_scale_input_d() -> None:
    a, b = integers(17, 128, 16), integers(18, 32, 16)
    image, first, second = both_operands(a, b, "bf16", 1, 6)
    before = np.random.default_rng(1).integers(-64, 64, (1, 128, 32)).astype(np.float32)
    program = store_words(32, 32) + mma(first, second, instruction_descriptor(128, 32), accumulate=1, tail=", 3") + commit() + wait("$done")
    cells, report = TensorKernel(program, 1, 32, image.shape[1], words=32).run(image, before.view(np.uint32))
    assert not report.findings
    assert np.array_equal(cells[0].view(np.float32), before[0] / 8 + a @ b.T)


def test_one_tile_as_keys_and_values() -> None:
    """One tile is read as K-major B and, transposed, as MN-major B whose columns spread over several boxes."""
    keys = integers(19, 64, 128)
    image = np.full((1, 64 * 1024), 0xFF, np.uint8)
    for box in range(2):  # boxes of 64 keys x 128 bytes
        place(image[0], encode(keys[:, 64 * box : 64 * box + 64], "bf16"), 8192 * box, 2, False)
    a = integers(20, 128, 128)
    fields = place(image[0], encode(a, "bf16"), 16384, 2, False)
    atom = 128 * 128  # bytes of 64 elements of k of A
    left = [smem_descriptor(16384 + k // 4 * atom + k % 4 * 32, *fields) for k in range(8)]
    right = [smem_descriptor(k // 4 * 8192 + k % 4 * 32) for k in range(8)]
    program = "".join(mma(left[k], right[k], instruction_descriptor(128, 64), accumulate=int(k > 0)) for k in range(8))
    values = [smem_descriptor(2048 * k, 8192, 1024) for k in range(4)]
    idesc = instruction_descriptor(128, 128, more=1 << 16)
    program += "".join(mma(left[k], values[k], idesc, d=64, accumulate=int(k > 0)) for k in range(4))
    cells, report = TensorKernel(program + commit() + wait("$done"), 1, 192, image.shape[1]).run(image)
    assert not report.findings
    assert np.array_equal(cells[0, :, :64].view(np.float32), a @ keys.T)
    assert np.array_equal(cells[0, :, 64:].view(np.float32), a[:, :64] @ keys)


def test_poison_of_operands_and_accumulator() -> None:
    """A row of A and a row of B that nobody wrote poison a row and a column of D, and with accumulation the whole accumulator counts."""
    a, b = integers(21, 128, 16), integers(22, 32, 16)
    image, first, second = both_operands(a, b, "bf16", 1, 6)
    inside = mma(first, second, instruction_descriptor(128, 32), accumulate=1) + commit() + wait("$done")
    _, report = TensorKernel(inside, 1, 32, image.shape[1]).run(image)
    assert kinds(report) == {"poison"}
    outside = smem_descriptor(image.shape[1] - 256, 16, 256, 6)  # its last rows lie behind the image
    program = mma(first, outside, instruction_descriptor(128, 32)) + commit() + wait("$done")
    _, report = TensorKernel(program, 1, 32, image.shape[1]).run(image)
    assert kinds(report) == {"poison"}


# ---------------------------------------------------------------- machine code

MACHINE_CODE: dict[str, Evidence] = {
    "128 x 64": (partial(test_where_d_lies, 1, False, 128, 64), "UTCHMMA UTCBAR UTCATOMSWS.AND UTCATOMSWS.FIND_AND_SET.ALIGN"),
    "64 x 72": (partial(test_where_d_lies, 1, False, 64, 72), "UTCHMMA LDTM.x32 STTM.x32"),
    "pair, 256 x 64": (
        partial(test_where_d_lies, 2, False, 256, 64),
        "UTCHMMA.2CTA UTCBAR.2CTA.MULTICAST UTCATOMSWS.2CTA.FIND_AND_SET.ALIGN STAS ATOMS.XOR",
    ),
    "pair, 128 x 128": (partial(test_where_d_lies, 2, False, 128, 128), "UTCHMMA.2CTA"),
    "weight stationary": (partial(test_where_d_lies, 1, True, 64, 128), "UTCHMMA.WS"),
    "tf32": (partial(test_types_and_operand_layouts, "tf32", (False, False), 2), "UTCHMMA"),
    "tf32, transposed": (partial(test_types_and_operand_layouts, "tf32", (True, False), 1), "UTCHMMA"),
    "f16, transposed": (partial(test_types_and_operand_layouts, "f16", (False, True), 4), "UTCHMMA"),
    "e4m3": (partial(test_types_and_operand_layouts, "e4m3", (False, False), 0), "UTCQMMA UBLKCP.S.G"),
    "f16 sums": (test_f16_accumulator_lies_in_the_lower_half, "UTCHMMA"),
    "steps": (partial(test_accumulation_over_steps, SCHEDULES[2], 2, 128), "UTCHMMA.2CTA"),
    "A in tensor memory": (partial(test_a_in_tensor_memory, 1, False, 128, "bf16"), "UTCHMMA"),
    "A in tensor memory, pair": (partial(test_a_in_tensor_memory, 2, False, 128, "e4m3"), "UTCQMMA.2CTA"),
    "A in tensor memory, weight stationary": (partial(test_a_in_tensor_memory, 1, True, 32, "e4m3"), "UTCQMMA.WS"),
    "disabled lanes": (partial(test_disabled_lanes_keep_what_they_had, 1), "UTCHMMA"),
    "disabled lanes, pair": (partial(test_disabled_lanes_keep_what_they_had, 2), "UTCHMMA.2CTA"),
    "scaled sums": (test_scale_input_d, "UTCHMMA"),
}


@pytest.mark.parametrize("name", MACHINE_CODE)
def test_as_machine_code(name: str) -> None:
    check_machine_code(*MACHINE_CODE[name])
