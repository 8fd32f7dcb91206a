"""Work of the tensor core of a CTA or a pair in machine code: UTCHMMA, UTCQMMA, UTCCP and UTCBAR. Each executes once per warp."""

from __future__ import annotations

import numpy as np

from ..findings import Fault
from ..isa.emitter import Emitter, Unsupported
from ..isa.table import runtime
from ..isa.tcgen05_ops import Step, tensor_commit, tensor_copy, tensor_mma
from ..numerics.tcgen05 import CollectorUse, MmaForm
from ..state.window import Window
from ..units.shared_to_tensor import CopyForm
from .accesses import width
from .asynchronous import leaders, uniform_words
from .listing import Address, Immediate, Register, SassInstruction
from .operands import constant, pair, source
from .table import op
from .tensor_moves import tensor_address

_USAGES = {(): "discard", ("KEEP",): "fill", ("REUSE", "KEEP"): "use", ("REUSE",): "lastuse"}
_SHAPES = {
    "": "128x256b", "4dp256bit": "4x256b", "128dp128bit": "128x128b", "2x64dp128bit_lw02_lw13": "64x128b.warpx2::02_13",
    "2x64dp128bit_lw01_lw23": "64x128b.warpx2::01_23", "4x32dp128bit": "32x128b.warpx4",
}  # fmt: skip
_TF32 = 2  # type of A in an instruction descriptor


class Products:
    """Fixed properties of one instruction, by the kind of its operands. UTCHMMA has two kinds, of which the descriptor chooses."""

    def __init__(self, base: str, group: int, ws: bool, in_tensor: bool, scale: int, collector: CollectorUse) -> None:
        kinds = ("f16", "tf32") if base == "UTCHMMA" else ("f8f6f4", "f8f6f4")
        self.steps = [Step(MmaForm(group, ws, kind), in_tensor, scale, collector) for kind in kinds]

    def step(self, descriptor: int) -> Step:
        """Return the properties for an instruction descriptor."""
        return self.steps[descriptor >> 7 & 7 == _TF32]


@op(r"UTC[HQ]MMA(.2CTA|.WS)?", pure=False, taint="own", writes=())
def multiply(e: Emitter, ins: SassInstruction) -> None:
    """Emit a product: A, B, the address of D, the instruction descriptor behind a word that is 0, a mask, and if D is added."""
    a, b, d, zero, descriptor, *rest = ins.operands
    group, ws = 2 if "2CTA" in ins.modifiers else 1, "WS" in ins.modifiers
    mask: Register | None = None
    if rest and isinstance(rest[0], Register) and not rest[0].is_predicate:
        mask, rest = rest[0], rest[1:]
    if not rest or not isinstance(rest[0], Register) or not rest[0].is_predicate:
        raise Unsupported(f"operands {ins.operands} of a matrix product")
    enable, scale = rest[0], 0
    if len(rest) > 1:
        if len(rest) > 2 or not isinstance(rest[1], Immediate) or not 0 <= rest[1].bits <= 15 or ws:
            raise Unsupported(f"operands {ins.operands} of a matrix product")
        scale = rest[1].bits
    e.check_taint(list(enable.registers()), "a matrix product")
    in_tensor = isinstance(a, Address) and a.space == "tmem"
    first = tensor_address(e, a, "a matrix product") if in_tensor else shared_descriptor(e, a)
    fixed = e.constants.thing(Products(ins.base, group, ws, in_tensor, scale, collector_of(a, b, ws)))
    words = [tensor_address(e, d, "a matrix product"), first, shared_descriptor(e, b), instruction_descriptor(e, zero, descriptor)]
    e.line(f"tensor_product(w, {fixed}, ({', '.join(words)},), {mask_of(e, ins, mask)}, {source(e, enable, 'pred')})")


def collector_of(a: object, b: object, ws: bool) -> CollectorUse:
    """Return the use of the collector that A names, or B of a weight-stationary product."""
    assert isinstance(a, Address)
    assert isinstance(b, Address)
    letter, operand, other = ("B", b, a) if ws else ("A", a, b)
    buffers = [word for word in operand.suffixes if word.startswith("BUFFER")]
    usage = _USAGES.get(tuple(word.removeprefix(f"{letter}_") for word in operand.suffixes if word not in buffers))
    if other.suffixes or usage is None or len(buffers) > ws:
        raise Unsupported(f"operands {a} and {b} of a matrix product")
    return CollectorUse(f"b{buffers[0][-1] if buffers else 0}" if ws else "a", usage)


def shared_descriptor(e: Emitter, operand: object) -> str:
    """Return the expression of a descriptor of shared memory, a uniform pair."""
    if not isinstance(operand, Address) or operand.space != "gdesc" or operand.uniform is None or operand.offset:
        raise Unsupported(f"{operand} instead of a descriptor")
    e.check_taint(list(operand.uniform.registers(2)), "a descriptor")
    return pair(e, operand.uniform)


def instruction_descriptor(e: Emitter, zero: object, operand: object) -> str:
    """Return the expression of the instruction descriptor. The register in front of it, written as tmem[..], must be 0."""
    known = (
        isinstance(zero, Address) and isinstance(operand, Address) and (zero.space, operand.space) == ("tmem", "idesc")
        and zero.uniform is not None and operand.uniform is not None and zero.uniform.number is not None
        and operand.uniform.number == zero.uniform.number + 1 and not (zero.offset or operand.offset)
    )  # fmt: skip
    if not known:
        raise Unsupported(f"{zero} and {operand} instead of an instruction descriptor")
    assert isinstance(zero, Address)
    assert zero.uniform is not None
    low, high = uniform_words(e, zero, 2)[1:-2].split(", ")
    return f"plain_product({low}, {high})"


@runtime
def plain_product(zero: np.ndarray, descriptor: np.ndarray) -> np.ndarray:
    """Return an instruction descriptor. Raises Fault where the word in front of it, whose meaning is unknown, is not 0."""
    if np.count_nonzero(zero):
        raise Fault("unsupported", f"a matrix product with the word {int(zero.flat[0]):#x} in front of its instruction descriptor")
    return descriptor


def mask_of(e: Emitter, ins: SassInstruction, mask: Register | None) -> str:
    """Return the expression of the words of a mask: of output lanes, or of columns for a weight-stationary product; None without one."""
    if mask is None:
        return "None"
    count = width(ins, ins.operands.index(mask))
    e.check_taint(list(mask.registers(count)), "a matrix product")
    words = [e.row(register, "u32") for register in mask.registers(count)] or [constant(e, "u32", 0)] * count
    return f"[{', '.join(words)}]"


@runtime
def tensor_product(w: Window, fixed: Products, operands: tuple[np.ndarray, ...], mask: list[np.ndarray] | None, enable: np.ndarray) -> None:
    """Execute UTCHMMA and UTCQMMA in the first lane of each warp."""
    window, where = leaders(w)
    d, a, b, descriptor = (np.broadcast_to(operand, (w.n,))[where] for operand in operands)
    words = None if mask is None else [np.broadcast_to(word, (w.n,))[where] for word in mask]
    step = fixed.step(int(descriptor[0]))
    columns = None
    if step.form.ws and words is not None:
        columns, words = words[1].astype(np.uint64) << np.uint64(32) | words[0], None
    tensor_mma(window, step, (d, a, b, descriptor), words, np.broadcast_to(enable, (w.n,))[where], columns)


@op(r"UTCCP.T.S(.2CTA)?(.4dp256bit|.128dp128bit|.2x64dp128bit_lw02_lw13|.2x64dp128bit_lw01_lw23|.4x32dp128bit)?",
    pure=False, taint="own", writes=())  # fmt: skip
def copy(e: Emitter, ins: SassInstruction) -> None:
    """Emit a copy of shared memory to tensor memory."""
    target, start = ins.operands
    shape = _SHAPES["".join(word for word in ins.modifiers if word not in ("T", "S", "2CTA"))]
    form = e.constants.thing(CopyForm(2 if "2CTA" in ins.modifiers else 1, shape))
    place = tensor_address(e, target, "a copy to tensor memory")
    e.line(f"copy_to_tensor(w, {form}, {place}, {shared_descriptor(e, start)})")


@runtime
def copy_to_tensor(w: Window, form: CopyForm, address: np.ndarray, descriptor: np.ndarray) -> None:
    """Execute UTCCP in the first lane of each warp."""
    window, where = leaders(w)
    tensor_copy(window, form, np.broadcast_to(address, (w.n,))[where], np.broadcast_to(descriptor, (w.n,))[where])


@op(r"UTCBAR(.2CTA)?(.MULTICAST)?", pure=False, taint="own", writes=())
def commit(e: Emitter, ins: SassInstruction) -> None:
    """Emit an arrival that happens when all earlier work of the thread is done; the mask of CTAs is not shifted."""
    place, zero, *others = ins.operands
    if not isinstance(place, Address) or zero != Register("UR", None) or len(others) != ("MULTICAST" in ins.modifiers):
        raise Unsupported(f"operands {ins.operands} of a commit")
    mask = "None"
    if others:
        assert isinstance(others[0], Register)
        e.check_taint(list(others[0].registers()), "a tensor core commit")
        mask = source(e, others[0], "u32")
    group = 2 if "2CTA" in ins.modifiers else 1
    e.line(f"commit_products(w, {uniform_words(e, place, 1)}[0], {mask}, {group})")


@runtime
def commit_products(w: Window, address: np.ndarray, mask: np.ndarray | None, group: int) -> None:
    """Execute UTCBAR in the first lane of each warp."""
    window, where = leaders(w)
    chosen = None if mask is None else (np.broadcast_to(mask, (w.n,))[where] & np.uint32(0xFFFF)).astype(np.uint16)
    tensor_commit(window, address[where], chosen, group)
