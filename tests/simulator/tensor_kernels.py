"""Hand-written kernels around tcgen05: a prologue that brings bytes to shared memory, a program, an epilogue that dumps tensor memory.

Registers: %r0 thread, %r1 shared base (barriers at +0 and +8, the tensor memory address at +16), %r2 warp, %r3 tensor memory base,
%r4 CTA rank, %r5 tensor memory address of the warp's lanes, %p0 "I am thread 0", %p1 "I am thread 0 of the even CTA".
Parameters: p0 output (ctas, 128, columns) uint32; p1 image (ctas, bytes) for shared memory at DATA; p2 words (ctas, 128, columns).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from cute_mla.simulator import Policy, Report
from tests.simulator.small_kernels import Kernel, aligned

BASE = 0x400  # where dynamic shared memory begins
DATA = 1024  # where the image lies, from there
SCHEDULES = [Policy.named("round_robin"), Policy.named("lazy"), Policy.named("random", 3), Policy.named("adversarial")]
FILL = 0x12345678
PAIR = "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;\n"
WAIT = """
{name}_wait: mbarrier.try_wait.parity.shared::cta.b64 %p9, [%r1+{offset}], {parity}, 10000;
@!%p9 bra {name}_wait;
"""


def wait(name: str, offset: int = 8, parity: int = 0) -> str:
    """Wait for a phase of a barrier."""
    return WAIT.format(name=name, offset=offset, parity=parity)


def leader(group: int) -> str:
    """Return the predicate of the thread that issues products."""
    return "%p1" if group == 2 else "%p0"


def commit(group: int = 1) -> str:
    """Return PTX of a commit to the second barrier (of both CTAs of a pair)."""
    if group == 1:
        return "@%p0 tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r1+8];\n"
    return (
        "mov.u16 %h1, 3;\nadd.u32 %r9, %r1, 8;\n"
        "@%p1 tcgen05.commit.cta_group::2.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64 [%r9], %h1;\n"
    )


def smem_descriptor(offset: int, leading: int = 16, stride: int = 1024, layout: int = 2) -> int:
    """Return a descriptor of the image's bytes from offset on."""
    return (BASE + DATA + offset) >> 4 | leading >> 4 << 16 | stride >> 4 << 32 | 1 << 46 | layout << 61


def instruction_descriptor(m: int, n: int, d: int = 1, a: int = 1, b: int = 1, more: int = 0) -> int:
    """Return an instruction descriptor; bf16 x bf16 -> f32 unless said otherwise."""
    return d << 4 | a << 7 | b << 10 | n >> 3 << 17 | m >> 4 << 24 | more


@dataclass(frozen=True)
class Options:
    """Options of a product. d: column of D. tail: operands after the predicate. collector: such as ".collector::a::fill"."""

    group: int = 1
    d: int = 0
    accumulate: int = 0
    kind: str = "f16"
    mask: str = ""
    tail: str = ""
    ws: bool = False
    collector: str = ""


def mma(a: int | str, b: int, idesc: int, **options: Any) -> str:
    """Return one product. a: descriptor, or the column of tensor memory as text. options: fields of Options."""
    more = Options(**options)
    operand = "%rd10"
    setup = f"mov.u64 %rd11, {b};\nadd.u32 %r6, %r3, {more.d};\nsetp.ne.u32 %p5, {more.accumulate}, 0;\n"
    if isinstance(a, str):
        setup += f"add.u32 %r7, %r3, {int(a)};\n"
        operand = "[%r7]"
    else:
        setup += f"mov.u64 %rd10, {a};\n"
    name = f"tcgen05.mma{'.ws' if more.ws else ''}.cta_group::{more.group}.kind::{more.kind}{more.collector}"
    return f"{setup}@{leader(more.group)} {name} [%r6], {operand}, %rd11, {idesc}, {more.mask}%p5{more.tail};\n"


def store_words(columns: int, count: int, at: int = 0) -> str:
    """Columns of p2 to tensor memory columns [at, at + count), a multiple of 8, with waits and a barrier."""
    text = f"ld.param.u64 %rd8, [p2];\nmad.lo.u32 %r8, %r4, 128, %r0;\nmul.wide.u32 %rd9, %r8, {4 * columns};\nadd.s64 %rd8, %rd8, %rd9;\n"
    for first in range(0, count, 8):
        registers = [f"%r{20 + i}" for i in range(8)]
        for i, register in enumerate(registers):
            text += f"ld.global.b32 {register}, [%rd8+{4 * (first + i)}];\n"
        text += f"add.u32 %r8, %r5, {at + first};\ntcgen05.st.sync.aligned.32x32b.x8.b32 [%r8], {{{', '.join(registers)}}};\n"
    return text + "tcgen05.wait::st.sync.aligned;\nbar.sync 0;\n"


def fill(columns: int, group: int = 1) -> str:
    """Return PTX that fills tensor memory columns [0, columns) with a pattern, waits and barriers included."""
    step = 32 if columns % 32 == 0 else 8
    registers = ", ".join(["%r20"] * step)
    text = f"mov.u32 %r20, {FILL};\n"
    for first in range(0, columns, step):
        text += f"add.u32 %r8, %r5, {first};\ntcgen05.st.sync.aligned.32x32b.x{step}.b32 [%r8], {{{registers}}};\n"
    return text + "tcgen05.wait::st.sync.aligned;\nbar.sync 0;\n" + ("" if group == 1 else PAIR)


def dump(columns: int) -> str:
    """Tensor memory columns [0, columns) to the output."""
    text = f"mad.lo.u32 %r8, %r4, 128, %r0;\nmul.wide.u32 %rd9, %r8, {4 * columns};\nadd.s64 %rd9, %rd0, %rd9;\n"
    step = min(columns, 32)
    registers = [f"%r{60 + i}" for i in range(step)]
    for first in range(0, columns, step):
        text += f"add.u32 %r8, %r5, {first};\ntcgen05.ld.sync.aligned.32x32b.x{step}.b32 {{{', '.join(registers)}}}, [%r8];\n"
        text += "tcgen05.wait::ld.sync.aligned;\n"
        for i, register in enumerate(registers):
            text += f"st.global.b32 [%rd9+{4 * (first + i)}], {register};\n"
    return text


@dataclass
class TensorKernel:
    """A program between prologue and epilogue. cells: columns that are dumped. words: columns of p2."""

    program: str
    group: int = 1
    cells: int = 64
    image: int = 0
    columns: int = 512
    epilogue: str = "bar.sync 0;\n@!%p3 bra $end;\ntcgen05.dealloc.cta_group::{group}.sync.aligned.b32 %r3, {columns};\n$end:\n"
    words: int = 0
    output: bool = True
    room: int = 1024  # bytes of shared memory behind the image

    def prologue(self) -> str:
        """Return the set-up, up to the image in shared memory."""
        text = """
mov.u32 %r1, smem; shr.u32 %r2, %r0, 5; mov.u32 %r4, %cluster_ctarank;
setp.eq.u32 %p0, %r0, 0; setp.eq.u32 %p2, %r4, 0; and.pred %p1, %p0, %p2; setp.eq.u32 %p3, %r2, 0;
@%p0 mbarrier.init.shared::cta.b64 [%r1], 1;
@%p0 mbarrier.init.shared::cta.b64 [%r1+8], 1;
@%p0 fence.mbarrier_init.release.cluster;
"""
        text += "@!%p3 bra $allocated;\nadd.u32 %r9, %r1, 16;\n"
        text += f"tcgen05.alloc.cta_group::{self.group}.sync.aligned.shared::cta.b32 [%r9], {self.columns};\n$allocated:\n"
        text += "bar.sync 0;\n"
        if self.group == 2:
            text += PAIR
        text += "ld.shared.u32 %r3, [%r1+16];\nshl.b32 %r5, %r2, 21;\nadd.u32 %r5, %r5, %r3;\n"
        if self.image:
            text += f"""
ld.param.u64 %rd8, [p1]; mul.wide.u32 %rd9, %r4, {self.image}; add.s64 %rd8, %rd8, %rd9; add.u32 %r9, %r1, {DATA};
@%p0 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r1], {self.image};
@%p0 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r9], [%rd8], {self.image}, [%r1];
{wait("$image", 0)}"""
            if self.group == 2:
                text += PAIR
        return text

    def text(self) -> str:
        """Return the whole body."""
        end = self.epilogue.format(group=self.group, columns=self.columns)
        if self.group == 2:
            end = PAIR + end
        return self.prologue() + self.program + (dump(self.cells) if self.output else "") + end

    def run(self, image: Any = None, words: Any = None, policy: Policy | None = None) -> tuple[np.ndarray, Report]:
        """Run; the dumped cells (ctas, 128, cells) and the report."""
        ctas = self.group
        out = aligned(ctas * 128 * self.cells, np.uint32)
        pad = aligned(ctas * max(self.image, 16), np.uint8)
        if image is not None:
            pad[:] = np.ascontiguousarray(image).reshape(-1).view(np.uint8)
        more = aligned(ctas * 128 * max(self.words, 1), np.uint32)
        if words is not None:
            more[:] = np.ascontiguousarray(words, np.uint32).reshape(-1)
        kernel = Kernel(self.text(), threads=128, smem=DATA + self.image + self.room, grid=ctas, cluster=ctas)
        report = kernel.run(out, pad, more, policy=policy, undefined=(0,))
        return out.reshape(ctas, 128, self.cells), report


# ---------------------------------------------------------------- operands

BITS = {0: 0, 6: 1, 4: 2, 2: 3}
SPAN = {0: 16, 6: 32, 4: 64, 2: 128, 1: 128}


def swizzled(address: int, layout: int) -> int:
    """CuTe's Swizzle<b, 4, 3> on a byte address; Swizzle<2, 5, 2> for the 128-byte swizzle of 32-byte atoms."""
    if layout == 1:
        return address ^ ((address >> 7) & 3) << 5
    return address ^ ((address >> 7) & ((1 << BITS[layout]) - 1)) << 4


def encode(values: np.ndarray, dtype: str) -> np.ndarray:
    """Return small integers as raw elements of a type."""
    import torch

    if dtype in ("s8", "u8"):
        return values.astype(np.int8).view(np.uint8)
    if dtype == "tf32":
        return values.astype(np.float32).view(np.uint32)
    kinds = {"f16": torch.float16, "bf16": torch.bfloat16, "e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
    raw = torch.from_numpy(np.ascontiguousarray(values, np.float32)).to(kinds[dtype])
    return raw.view(torch.uint8 if raw.itemsize == 1 else torch.int16).numpy().view(f"u{raw.itemsize}")


def place(image: np.ndarray, raw: np.ndarray, offset: int, layout: int, mn_major: bool) -> tuple[int, int]:
    """Put a matrix (rows, k) into an image of the shared memory, from offset (a multiple of 1024) on. Returns LBO and SBO.

    CuTe's canonical layouts. K-major: atoms of 8 rows x one span, rows first. MN-major: atoms of one span x 8 (4) k, the span first.
    """
    rows, depth = raw.shape
    item, span = raw.itemsize, SPAN[layout]
    if mn_major:
        deep = 4 if layout == 1 else 8
        across = deep * span
        along = across * -(-rows * item // span)
        fields = (along, across) if layout == 0 else (across, along)
    else:
        across, along = 8 * span, 8 * span * -(-rows // 8)
        fields = (along if layout == 0 else 16, across)
    for row in range(rows):
        for k in range(depth):
            if mn_major:
                byte = row * item
                address = byte // span * across + byte % span + k % deep * span + k // deep * along
            else:
                byte = k * item
                address = row // 8 * across + row % 8 * span + byte // span * along + byte % span
            where = swizzled(BASE + DATA + offset + address, layout) - BASE - DATA
            image[where : where + item] = np.frombuffer(raw[row, k].tobytes(), np.uint8)
    return fields
