"""Gates: checks that a kernel must pass before it ships. A failed gate names the kernel, the figure and the limit.

The simulator executes the PTX and a GPU executes the cubin, so most gates compare the two. The strongest is `reassembly`: it assembles
the PTX again with the ptxas program of the release that the DSL has built in. Every section of the two cubins must be equal, except the
note in which each assembler signs its work. The instruction counts serve machines without that program.

How ptxas 13.4 translates the counted instructions, found on 26 PTX files of NVIDIA's Hopper examples and of this project:
- one to one: wgmma.mma_async -> *GMMA, tensor copies to shared memory -> UTMALDG, bulk copies -> UBLKCP,
  mbarrier.init -> SYNCS.EXCH, setmaxnreg -> USETMAXREG, cluster barriers -> UCGABAR_ARV and UCGABAR_WAIT;
- at least one: tensor copies from shared memory -> UTMASTG, because ptxas unrolls their loops; mbarrier.arrive -> SYNCS.ARRIVE,
  mbarrier waits -> SYNCS.PHASECHK...TRYWAIT and bar -> BAR, because ptxas may duplicate the code around one (for a wait, a first try
  before the loop), and because a cluster barrier adds a BAR; likewise fence.proxy.async -> FENCE;
- products and sums in fp32, one to one, except where ptxas contracts a product and a sum, and the routines of divisions (see ROUTINES);
- wgmma.wait_group -> WARPGROUP.DEPBAR. If ptxas cannot prove that the accumulators stay untouched, it serialises the MMAs: a DEPBAR
  follows each of them (44 for 2 waits in the PTX), and the kernel is much slower.

For Blackwell, found on 18 PTX files of NVIDIA's examples:
- one to one: tcgen05.mma -> UTC*MMA, tcgen05.commit -> UTCBAR; both, like UTMALDG, have .2CTA for a CTA pair;
- at least one, because ptxas unrolls loops: tcgen05.ld -> LDTM, tcgen05.st -> STTM, tcgen05.cp -> UTCCP, tcgen05.alloc -> UTCATOMSWS
  (two, and a loop that waits for its turn), tcgen05.dealloc -> UTCATOMSWS.AND, tcgen05.wait::st -> FENCE.VIEW.ASYNC.T;
- none: tcgen05.wait::ld and the tcgen05 fences, which constrain what ptxas may move and become scoreboards.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from cute_mla.simulator.sass.cubin import TOOL_NOTE, CubinInfo
from cute_mla.simulator.sass.exposed_loads import MIN_CLOCKS
from cute_mla.spec.abi import Param, ParamKind
from cute_mla.spec.arch import Arch

from .known_exposed_loads import KNOWN_EXPOSED_LOADS
from .opcode_counts import count_matching
from .ptx import KernelParam, PtxInfo


@dataclass(frozen=True)
class Evidence:
    """Input of the gates.

    params, block, smem_bytes, tmem_columns, expected: declared by the kernel's source. ptx, cubin, sass: made by the compiler.
    overlapped: least instructions that the source declares to overlap products in flight; overlap: those that do (see count_overlap).
    reassembled: cubin that the ptxas program makes of the PTX, or None without that program. hazards: registers that the machine code
    touches too early. exposed: global loads of main loops that are waited for at once, by opcode (both simulator/sass).
    """

    kernel: str
    arch: Arch
    params: tuple[Param, ...]
    block: tuple[int, int, int]
    smem_bytes: int
    expected: dict[str, int]
    ptx: PtxInfo
    cubin: CubinInfo
    sass: Counter[str]
    reassembled: CubinInfo | None
    tmem_columns: int = 0
    overlapped: dict[str, int] = field(default_factory=dict)
    overlap: Counter[str] = field(default_factory=Counter)
    hazards: tuple[str, ...] = ()
    exposed: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True)
class Violation:
    """One failed check. figure: the value found. limit: the value allowed."""

    gate: str
    figure: str
    limit: str


class GateError(RuntimeError):
    """A kernel failed gates and must not ship."""

    def __init__(self, kernel: str, violations: tuple[Violation, ...]) -> None:
        super().__init__(kernel, violations)
        self.kernel = kernel
        self.violations = violations

    def __str__(self) -> str:
        """Return one line per violation."""
        return "\n".join(f"{self.kernel}: gate {found.gate}: {found.figure}, limit: {found.limit}" for found in self.violations)


Finding = tuple[str, str]  # figure, limit


def stack(evidence: Evidence) -> Iterator[Finding]:
    """Require no thread-local memory: a spilled register costs a memory round trip in the main loop."""
    if evidence.cubin.stack_bytes:
        yield f"stack {evidence.cubin.stack_bytes} bytes", "0 bytes"
    spills = count_matching(evidence.sass, r"LDL\b", r"STL\b")
    if spills:
        yield f"{spills} LDL/STL instructions", "0"


def registers(evidence: Evidence) -> Iterator[Finding]:
    """Require that a block's registers fit into one SM. A warp's registers are allocated in units of 256."""
    x, y, z = evidence.block
    warps = -(-x * y * z // 32)
    needed = warps * (-(-evidence.cubin.registers * 32 // 256) * 256)
    if needed > evidence.arch.registers_per_block:
        yield f"{needed} registers for {warps} warps of {evidence.cubin.registers} a thread", f"{evidence.arch.registers_per_block}"


def shared_memory(evidence: Evidence) -> Iterator[Finding]:
    """Require dynamic shared memory within the architecture's limit."""
    if evidence.smem_bytes > evidence.arch.smem_per_block:
        yield f"{evidence.smem_bytes} bytes of dynamic shared memory", f"{evidence.arch.smem_per_block} bytes on {evidence.arch.name}"


def tensor_memory(evidence: Evidence) -> Iterator[Finding]:
    """Require that the PTX allocates the declared columns of tensor memory, within the architecture's limit, and frees them."""
    asked = evidence.ptx.tmem_columns
    if None in asked:
        yield "a tcgen05.alloc of a number of columns that is computed", "an immediate"
    elif sum(filter(None, asked)) != evidence.tmem_columns:
        yield f"{' + '.join(map(str, asked)) or 0} columns of tensor memory allocated in the PTX", f"the {evidence.tmem_columns} declared"
    if evidence.tmem_columns > evidence.arch.tmem_columns:
        yield f"{evidence.tmem_columns} columns of tensor memory", f"{evidence.arch.tmem_columns} on {evidence.arch.name}"
    freed = evidence.ptx.count(r"tcgen05\.dealloc\b")
    if freed < len(asked):
        yield f"{freed} tcgen05.dealloc", f"at least the {len(asked)} allocations"


def entry_name(evidence: Evidence) -> Iterator[Finding]:
    """Require one kernel with the same name in PTX and cubin. ptxas generates other code for names that contain "cutlass"."""
    if len(evidence.ptx.entries) != 1 or evidence.ptx.entries != evidence.cubin.entries:
        yield f"entries {list(evidence.ptx.entries)} in the PTX, {list(evidence.cubin.entries)} in the cubin", "one and the same"
    for name in evidence.cubin.entries:
        if "cutlass" in name:
            yield f"entry name {name}", 'a name without "cutlass"'


def block_size(evidence: Evidence) -> Iterator[Finding]:
    """Require that the PTX's .reqntid is the block that the runtime launches."""
    if evidence.ptx.block != evidence.block:
        yield f".reqntid {evidence.ptx.block} in the PTX", f"the declared block {evidence.block}"


def parameters(evidence: Evidence) -> Iterator[Finding]:
    """Require that the declared parameters, the PTX's .param list and the cubin's KPARAM records agree."""
    declared = [(param.name, param.kind.value) for param in evidence.params]
    if len(evidence.ptx.params) != len(declared):
        yield f"{len(evidence.ptx.params)} parameters in the PTX", f"the {len(declared)} declared"
    if len(evidence.cubin.params) != len(declared):
        yield f"{len(evidence.cubin.params)} KPARAM records in the cubin", f"the {len(declared)} declared"
    for index, (param, found) in enumerate(zip(evidence.params, evidence.ptx.params, strict=False)):
        if not _is_passed_as(found, param.kind):
            yield f"parameter {index} is {_describe(found)} in the PTX", f"{param.name}: {param.kind.value} ({param.size} bytes)"
    for index, (param, (_, size)) in enumerate(zip(evidence.params, evidence.cubin.params, strict=False)):
        if size != param.size:
            yield f"parameter {index} takes {size} bytes in the cubin", f"{param.name}: {param.kind.value} ({param.size} bytes)"


def _is_passed_as(found: KernelParam, kind: ParamKind) -> bool:
    """Return whether the PTX declares a parameter as the runtime passes its kind."""
    if kind is ParamKind.POINTER:
        return found.size == 8 and found.pointer
    if kind is ParamKind.TENSOR_MAP:
        return found.size == 128 and found.type == ".b8" and found.align >= 64
    types = {ParamKind.FLOAT32: (".f32", ".b32"), ParamKind.INT32: (".u32", ".s32", ".b32"), ParamKind.INT64: (".u64", ".s64", ".b64")}
    return found.type in types[kind] and found.size == kind.size and not found.pointer


def _describe(found: KernelParam) -> str:
    return f"{found.type}{' .ptr' if found.pointer else ''} ({found.size} bytes, align {found.align})"


@dataclass(frozen=True)
class Relation:
    """Relation between counts of PTX and SASS instructions, given as regular expressions of opcodes.

    exact: the counts must be equal; otherwise the SASS may have more.
    """

    meaning: str
    ptx: tuple[str, ...]
    sass: tuple[str, ...]
    exact: bool


RELATIONS = (
    Relation("tensor-core operations", (r"wgmma\.mma_async", r"tcgen05\.mma\b"), (r"[HQIB]GMMA\b", r"UTC[HQIO]MMA\b"), exact=True),
    Relation("tensor-core operations of pairs", (r"tcgen05\.mma\..*cta_group::2",), (r"UTC[HQIO]MMA\..*2CTA",), exact=True),
    Relation("tensor-core commits", (r"tcgen05\.commit\b",), (r"UTCBAR\b",), exact=True),
    Relation("tensor-core commits of pairs", (r"tcgen05\.commit\..*cta_group::2",), (r"UTCBAR\..*2CTA",), exact=True),
    Relation("tensor-core commits to several CTAs", (r"tcgen05\.commit\..*multicast",), (r"UTCBAR\..*MULTICAST",), exact=True),
    Relation("tensor-memory loads", (r"tcgen05\.ld\b",), (r"LDTM\b",), exact=False),
    Relation("tensor-memory stores", (r"tcgen05\.st\b",), (r"STTM\b",), exact=False),
    Relation("tensor-memory copies", (r"tcgen05\.cp\b",), (r"UTCCP\b",), exact=False),
    Relation("waits for tensor-memory stores", (r"tcgen05\.wait::st\b",), (r"FENCE\.VIEW\.ASYNC\.T\b",), exact=False),
    Relation("tensor-memory allocations", (r"tcgen05\.alloc\b",), (r"UTCATOMSWS\..*FIND_AND_SET",), exact=False),
    Relation("tensor-memory deallocations", (r"tcgen05\.dealloc\b",), (r"UTCATOMSWS\.AND\b",), exact=False),
    Relation("TMA loads", (r"cp\.async\.bulk\.tensor\.\dd\.shared",), (r"UTMALDG\b",), exact=True),
    Relation("TMA loads of pairs", (r"cp\.async\.bulk\.tensor\.\dd\.shared.*cta_group::2",), (r"UTMALDG\..*2CTA",), exact=True),
    Relation("TMA loads to several CTAs", (r"cp\.async\.bulk\.tensor\.\dd\.shared.*multicast",), (r"UTMALDG\..*MULTICAST",), exact=True),
    Relation("TMA stores", (r"cp\.async\.bulk\.tensor\.\dd\.global",), (r"UTMASTG\b",), exact=False),
    Relation("bulk copies", (r"cp\.async\.bulk\.(shared|global)",), (r"UBLKCP\b",), exact=True),
    Relation("mbarrier initialisations", (r"mbarrier\.init\b",), (r"SYNCS\.EXCH\b",), exact=True),
    Relation("mbarrier arrivals", (r"mbarrier\.arrive\b",), (r"SYNCS\.ARRIVE\b",), exact=False),
    Relation("mbarrier waits", (r"mbarrier\.(try|test)_wait\b",), (r"SYNCS\.PHASECHK\b",), exact=False),
    Relation("block barriers", (r"(bar|barrier)\.(cta\.)?(sync|red|arrive)\b",), (r"BAR\b",), exact=False),
    Relation("cluster arrivals", (r"barrier\.cluster\.arrive\b",), (r"UCGABAR_ARV\b",), exact=True),
    Relation("cluster waits", (r"barrier\.cluster\.wait\b",), (r"UCGABAR_WAIT\b",), exact=True),
    Relation("proxy fences", (r"fence\.proxy\.async\b",), (r"FENCE\b(?!.*\.T\b)",), exact=False),
    Relation("waits for the grid before", (r"griddepcontrol\.wait\b",), (r"ACQBULK\b",), exact=False),
    Relation("register reallocations", (r"setmaxnreg\b",), (r"USETMAXREG\b",), exact=True),
)


def translation(evidence: Evidence) -> Iterator[Finding]:
    """Require all barrier, tensor-core and TMA instructions of the PTX in the SASS, and equal counts for those that map one to one."""
    for relation in RELATIONS:
        written, made = evidence.ptx.count(*relation.ptx), count_matching(evidence.sass, *relation.sass)
        if made < written or (relation.exact and made != written):
            yield f"{made} {relation.meaning} in the SASS", f"{'' if relation.exact else 'at least '}the {written} of the PTX"


# Products and sums in fp32: opcode of the SASS, those of the PTX that become one each, and those that may become one. Where there are
# none on pairs, ptxas makes two of each. It computes some in the uniform datapath, by opcodes that begin with U.
FLOATS = (
    ("FMUL", r"mul(\.rn)?\.f32\b", None),
    ("FADD", r"(add|sub)(\.rn)?\.f32\b", r"(neg|abs)\.f32\b"),
    ("FFMA", r"fma\.rn\.f32\b", None),
    ("FMUL2", r"mul(\.rn)?\.f32x2\b", None),
    ("FADD2", r"add(\.rn)?\.f32x2\b", None),
    ("FFMA2", r"fma\.rn\.f32x2\b", None),
)
# Further ones of the code that ptxas puts in place of one PTX instruction.
ROUTINES = {
    "div.rn.f32": {"FFMA": 5},
    "rcp.rn.f32": {"FFMA": 2},
    "sqrt.rn.f32": {"FFMA": 2},
    "rcp.approx.f32": {"FMUL": 2},
    "rsqrt.approx.f32": {"FMUL": 2},
    "ex2.approx.f32": {"FMUL": 2},
    "lg2.approx.f32": {"FMUL": 1, "FADD": 1},
}


def float_counts(evidence: Evidence) -> Iterator[Finding]:
    """Require equal numbers of products, sums and fmas in PTX and SASS. A contraction makes an fma of a product and a sum."""
    packed = evidence.arch.packed_floats
    for opcode, pattern, optional in FLOATS if packed else FLOATS[:3]:
        routines = sum(evidence.ptx.opcodes[name] * further.get(opcode, 0) for name, further in ROUTINES.items())
        written = evidence.ptx.count(pattern) + routines
        written += 0 if packed else 2 * evidence.ptx.count(rf"{opcode[1:].lower()}(\.rn)?\.f32x2\b")
        spare = evidence.ptx.count(optional) if optional else 0
        made = count_matching(evidence.sass, rf"U?{opcode}(?!\w|\.FTZ|\.R[MPZ])")
        if not written <= made <= written + spare:
            yield f"{made} {opcode} in the SASS", f"the {written} of the PTX" + (f" and at most {spare} for negations" if spare else "")


def contraction(evidence: Evidence) -> Iterator[Finding]:
    """Require that no rounding is left to ptxas: the simulator rounds a product and a sum apart where ptxas may use one fma."""
    for statement in evidence.ptx.contractible:
        yield f"{statement} takes a product that is not rounded by its own modifier", "an fma, or .rn on both"


def serialisation(evidence: Evidence) -> Iterator[Finding]:
    """Require that ptxas left the MMAs asynchronous."""
    allowed = evidence.ptx.count(r"wgmma\.(wait_group|commit_group)")
    waits = count_matching(evidence.sass, r"WARPGROUP\.DEPBAR")
    if waits > allowed:
        yield f"{waits} WARPGROUP.DEPBAR: the MMAs are serialised", f"{allowed}, the wgmma commits and waits of the PTX"


def expected_counts(evidence: Evidence) -> Iterator[Finding]:
    """Require the instruction counts that the source derives from its tile shapes."""
    for opcode, number in evidence.expected.items():
        pattern = rf"{opcode.replace('.', '[.]')}(?![A-Za-z0-9_])"
        found = count_matching(evidence.sass, pattern) if opcode.isupper() else evidence.ptx.count(pattern)
        if found != number:
            yield f"{found} {opcode}", f"the expected {number}"


def overlap(evidence: Evidence) -> Iterator[Finding]:
    """Require enough instructions between products and the wait for them: ptxas hoists the wait as far as its basic block allows."""
    for opcode, number in evidence.overlapped.items():
        found = count_matching(evidence.overlap, rf"{opcode.replace('.', '[.]')}(?![A-Za-z0-9_])")
        if found < number:
            yield f"{found} {opcode} between products and the wait for all of them", f"at least {number}"


def tool_note(evidence: Evidence) -> Iterator[Finding]:
    """Require that ptxas ran with exactly the requested options: the environment may add options."""
    options = f"-O 3 -arch {evidence.arch.gpu_arch}"
    if evidence.cubin.options != options:
        yield f"ptxas options {evidence.cubin.options!r}", repr(options)


def reassembly(evidence: Evidence) -> Iterator[Finding]:
    """Require that ptxas makes this cubin of this PTX: equal in every section except the tool note."""
    again = evidence.reassembled
    if again is None:
        return
    if again.tool != evidence.cubin.tool:
        yield f"ptxas {again.tool} assembled the PTX again", f"the DSL's own release, {evidence.cubin.tool}"
        return
    names = (evidence.cubin.sections.keys() | again.sections.keys()) - {TOOL_NOTE}
    differing = sorted(name for name in names if evidence.cubin.sections.get(name) != again.sections.get(name))
    if differing:
        yield f"sections {differing} differ when the PTX is assembled again", "none"


MAX_HAZARDS = 5  # listed of one kernel


def control_codes(evidence: Evidence) -> Iterator[Finding]:
    """Require that the machine code waits for every result and operand before it touches the register."""
    for hazard in evidence.hazards[:MAX_HAZARDS]:
        yield hazard, f"none (of {len(evidence.hazards)})"


def exposed_loads(evidence: Evidence) -> Iterator[Finding]:
    """Require that no main loop waits for a global load soon after its issue, besides the known exceptions, whose numbers are exact."""
    known = KNOWN_EXPOSED_LOADS.get(evidence.kernel, {})
    for opcode in sorted(evidence.exposed.keys() | known.keys()):
        found, allowed = evidence.exposed[opcode], known.get(opcode, 0)
        waits = f"{found} {opcode} in main loops with a wait less than {MIN_CLOCKS} stall clocks behind"
        if found > allowed:
            yield waits, f"{allowed or 'none'}"
        elif found < allowed:
            yield waits, f"the {allowed} of aot_build/known_exposed_loads.py, a table that only shrinks: enter {found}"


GATES: tuple[Callable[[Evidence], Iterator[Finding]], ...] = (
    stack,
    registers,
    shared_memory,
    tensor_memory,
    entry_name,
    block_size,
    parameters,
    translation,
    float_counts,
    contraction,
    serialisation,
    expected_counts,
    overlap,
    tool_note,
    control_codes,
    exposed_loads,
    reassembly,
)


def check(evidence: Evidence) -> None:
    """Run every gate. GateError with all violations."""
    violations = tuple(Violation(gate.__name__, figure, limit) for gate in GATES for figure, limit in gate(evidence))
    if violations:
        raise GateError(evidence.kernel, violations)
