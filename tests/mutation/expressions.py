"""Instructions as expressions of parameters and thread numbers, which stay when registers get other names."""

from __future__ import annotations

from cute_mla.manifest import KernelEntry
from cute_mla.simulator.frontend.ptx import Imm, Instruction, Mem, Negated, Operand, Reg, Special, Symbol, Vec
from tests.mutation.bounds import parameter_names
from tests.mutation.equality import analysis_of
from tests.mutation.intervals import Analysis, is_pure, registers, root, written
from tests.mutation.sites import Mutation

DEPTH = 4  # definitions that an expression goes back


def expression(kernel: KernelEntry, mutation: Mutation) -> str:
    """Return the broken instruction with its sources; "phi" is a register that is written more than once, ".." is left out."""
    analysis = analysis_of(kernel.name)
    names = parameter_names(kernel, analysis.entry)
    item = next((item for item in analysis.entry.instructions if item.line == mutation.line), None)
    return "" if item is None else _call(analysis, names, item, item.opcode, DEPTH)


def use(kernel: KernelEntry, mutation: Mutation) -> str:
    """Return the first instruction that reads the broken one's result, as an expression; empty if there is none."""
    analysis = analysis_of(kernel.name)
    names = parameter_names(kernel, analysis.entry)
    items = analysis.entry.instructions
    first = next((index for index, item in enumerate(items) if item.line == mutation.line), len(items))
    results = written(items[first]) if first < len(items) else []
    for item in items[first + 1 :]:
        if any(register in results for operand in item.operands[1:] for register in registers(operand)):
            return _call(analysis, names, item, item.opcode, DEPTH)
    return ""


def _call(analysis: Analysis, names: dict[str, str], item: Instruction, name: str, depth: int) -> str:
    sources = item.operands[1:] if is_pure(item) or root(item) in ("ld", "shfl", "vote") else item.operands
    return f"{name}({', '.join(_text(analysis, names, operand, depth) for operand in sources)})"


def _text(analysis: Analysis, names: dict[str, str], operand: Operand | None, depth: int) -> str:
    if isinstance(operand, Imm):
        return f"{operand.value:#x}" if operand.float_bits else str(operand.value)
    if isinstance(operand, Special):
        return operand.name
    if isinstance(operand, Symbol):
        return names.get(operand.name, operand.name)
    if isinstance(operand, Negated):
        return "!" + _text(analysis, names, operand.reg, depth)
    if isinstance(operand, Mem):
        inner = _text(analysis, names, operand.base, depth)
        return f"[{inner}+{operand.offset}]" if operand.offset else f"[{inner}]"
    if isinstance(operand, Vec):
        return "{" + ", ".join(_text(analysis, names, inner, depth) for inner in operand.items) + "}"
    if not isinstance(operand, Reg):
        return "_"
    item = analysis.once(operand)
    if item is None:
        return "phi"
    if root(item) == "mov" or item.opcode.startswith("ld.param"):
        text = _text(analysis, names, item.operands[1], depth)
        return text[1:-1] if item.opcode.startswith("ld.param") else text
    if not is_pure(item) and root(item) not in ("ld", "shfl", "vote"):
        return root(item)
    return _call(analysis, names, item, root(item), depth - 1) if depth else ".."
