"""Loaded machine code: a cubin as an entry that the engine runs like one of PTX."""

from __future__ import annotations

import re
from functools import partial

from ..codegen.control_flow import build_flow
from ..codegen.module import Entry, Module, collection_paused
from ..codegen.translator import Translator
from ..findings import SassError, UnsupportedInstruction
from ..frontend.layout import SHARED_BASE, Layout
from ..frontend.ptx import ParamDecl, Reg
from ..isa.emitter import Constants, Emitter, Unsupported
from ..isa.table import Decoded
from . import (
    asynchronous,
    floats,
    integers,
    local_memory,
    memory,
    moves,
    predicates,
    prefetches,
    products,
    stores,
    tensor_allocation,
    tensor_moves,
    tensor_products,
    warps,
)
from .control_codes import findings
from .cubin import CubinInfo, read_cubin
from .flow import JUMPS, spans
from .lift import Lift
from .listing import Listing, UnreadableError, read_listing, section_of
from .table import MachineInstruction, lookup

# importing them fills the instruction table
FAMILIES = (
    asynchronous, floats, integers, local_memory, memory, moves, predicates, prefetches, products, stores, tensor_allocation,
    tensor_moves, tensor_products, warps,
)  # fmt: skip
LARGEST_ACCESS = 16  # bytes; the stack ends at a multiple of it
JUMP_TABLES = 2  # constant bank of the tables of indirect branches
_KINDS = ("P", "UP", "R", "UR", "B")


def load_machine_code(cubin: bytes, text: str, *, kernel: str = "", is_traced: bool = False) -> Module:
    """Load a kernel of a cubin with its disassembly (`nvdisasm -c -hex`).

    kernel: which one, where the cubin has several. is_traced: every launch needs a MachineTrace as its observer.
    CubinError for bytes that are not a cubin with that one kernel, SassError for text without machine code, and UnsupportedInstruction with
    the list of everything unknown. Registers that the control codes do not guard are findings of every launch.
    """
    info = read_cubin(cubin, kernel)
    with collection_paused():
        (name,) = info.entries
        listing = read_known(section_of(text, name))
        if listing.name != name:
            raise SassError(f"the disassembly is of {listing.name}, the cubin of {name}")
        lift = Lift(listing, is_traced).run()
        layout = make_layout(info, lift.decoded)
        problems = lift.problems
        check_operands(lift.decoded, layout, problems)
        if problems:
            raise UnsupportedInstruction(refusal(name, problems))
        flow = build_flow(lift.decoded, lift.labels, layout)
        masks = {row for name, row in layout.rows.items() if name.startswith("B")}  # of regions: none at the start, not undefined
        flow.undefined["r"] = [row for row in flow.undefined["r"] if row not in masks]
        translator = Translator(name, flow, layout)
    allocates = any(ins.base == "UTCATOMSWS" for ins in listing.instructions)
    prepare = partial(tensor_allocation.prepare, tensor_allocation.record_of(listing)) if allocates else None
    return Module({name: Entry(name, parameters(info), None, flow, layout, translator, findings=findings(listing), prepare=prepare)})


def read_known(text: str) -> Listing:
    """Read a listing. UnsupportedInstruction names, where something cannot be read or followed, every unknown spelling beside it."""
    reason = ""
    try:
        listing = read_listing(text)
        spans(listing)
    except UnreadableError as error:
        listing, reason = error.listing, str(error)
    except SassError as error:
        listing, reason = read_listing(text), str(error)
    if reason:
        raise UnsupportedInstruction(refusal(listing.name, {**{line: [] for line in reason.splitlines()}, **unknown(listing)}))
    return listing


def unknown(listing: Listing) -> dict[str, list[int]]:
    """Return the spellings that no table has, and where they stand."""
    found: dict[str, list[int]] = {}
    for ins in listing.instructions:
        if ins.base not in JUMPS and lookup(ins.opcode) is None:
            found.setdefault(ins.opcode, []).append(ins.address)
    return found


def refusal(name: str, problems: dict[str, list[int]]) -> str:
    """Return the message about everything that is not supported in a kernel. problems: what -> addresses, none where it says them."""
    lines = [f"{what} (at {', '.join(f'{place:#x}' for place in where[:5])})" if where else what for what, where in problems.items()]
    return f"unsupported machine code in {name}:\n  " + "\n  ".join(lines)


def parameters(info: CubinInfo) -> tuple[ParamDecl, ...]:
    """Return the parameters of a cubin, named by their number."""
    return tuple(ParamDecl(f"parameter {index}", size, 1) for index, (_, size) in enumerate(info.params))


def make_layout(info: CubinInfo, decoded: list[Decoded]) -> Layout:
    """Lay out registers in the order of their numbers, and parameters where constant bank 0 has them."""
    layout = Layout(params_begin=info.param_base, dynamic_base=max(SHARED_BASE, info.shared_bytes))
    registers = {register for item in decoded for register in (*item.reads, *item.writes, *item.accumulators)}
    for register in sorted(registers, key=place_of):
        layout.place(register)
    layout.number(registers)
    ends = [info.param_base]
    for declared, (offset, size) in zip(parameters(info), info.params, strict=True):
        layout.params[declared.name] = info.param_base + offset
        ends.append(info.param_base + offset + size)
    layout.param_bytes = max(ends)
    layout.local_bytes = -(-info.stack_bytes // LARGEST_ACCESS) * LARGEST_ACCESS
    table = info.sections.get(f".nv.constant2.{info.entries[0]}")
    if table is not None:
        layout.tables[JUMP_TABLES] = table
    return layout


def place_of(register: Reg) -> tuple[int, int]:
    """Return the kind and the number of a register, as a key for sorting."""
    kind = register.name.rstrip("0123456789")
    return _KINDS.index(kind), int(register.name[len(kind) :])


def check_operands(decoded: list[Decoded], layout: Layout, problems: dict[str, list[int]]) -> None:
    """Try every distinct operand form at load; unsupported forms go to problems."""
    seen: set[str] = set()
    for item in decoded:
        instruction = item.instruction
        if item.spec.emit is None or not isinstance(instruction, MachineInstruction) or instruction.sass is None:
            continue
        form = re.sub(r"(?<=[RPB])\d+", "", instruction.sass.text)
        if form in seen:
            continue
        seen.add(form)
        try:
            item.spec.emit(Emitter(layout, Constants(), False), instruction, item.match)
        except Unsupported as error:
            problems.setdefault(f"{instruction.sass.text}: {error}", []).append(instruction.sass.address)
        except (IndexError, TypeError, ValueError, AssertionError) as error:
            problems.setdefault(f"{instruction.sass.text}: operands not understood ({error!r})", []).append(instruction.sass.address)
