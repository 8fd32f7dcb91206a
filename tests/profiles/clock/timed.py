"""Small PTX kernels on the clock: assembled by ptxas, executed, and timed with warm caches unless said otherwise."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import pytest

from cute_mla.aot_build.tools import assemble
from cute_mla.profiles.clock.constants import Constants, constants
from cute_mla.profiles.clock.engine import Result, Setting
from cute_mla.profiles.clock.kernel import KernelClock
from cute_mla.profiles.clock.spans import ISSUE, Span
from cute_mla.simulator import GlobalMemory, Launch, Policy, Report, TensorMap, run
from cute_mla.simulator.sass.disassembler import disassemble
from cute_mla.simulator.sass.listing import Listing, SassInstruction, read_listing
from cute_mla.simulator.sass.module import load_machine_code
from cute_mla.simulator.sass.trace import MachineTrace
from tests.simulator.small_kernels import Kernel, aligned

H100, B200 = constants("H100"), constants("B200")
WARM = Setting(hbm_bytes=16.0, cold=False, spans=True)
POLICY = replace(Policy(), waits_block=True, most_instructions=100_000)

BARRIERS = """
    mov.u32 %r100, smem; setp.ne.u32 %p20, %r0, 0; @%p20 bra INITIALISED;
    mbarrier.init.shared.b64 [%r100], {count}; mbarrier.init.shared.b64 [%r100+8], {count};
    fence.mbarrier_init.release.cluster;
INITIALISED: bar.sync 0; shr.u32 %r101, %r0, 5; setp.ne.u32 %p21, %r101, 0;
"""

Argument = np.ndarray | TensorMap
Edit = Callable[[str], str]


@dataclass(frozen=True)
class Timed:
    """A kernel that has run. code: its instructions by address."""

    listing: Listing
    result: Result
    code: dict[int, SassInstruction]

    def issues(self, opcode: str, warp: int = 0) -> list[int]:
        """Return when a warp of the first CTA issued the instructions whose opcode begins so."""
        return [span.start for span in self.spans(str(warp)) if span.name == ISSUE and self.code[span.address].opcode.startswith(opcode)]

    def spans(self, track: str) -> list[Span]:
        """Return the spans of a track of the first CTA."""
        return [span for span in self.result.spans if span.rank == 0 and span.track == track]

    def gaps(self, opcode: str, warp: int = 0) -> list[int]:
        """Return the clocks from each issue of an opcode to the next."""
        return np.diff(self.issues(opcode, warp)).tolist()

    def next_issue(self, clock: int, warp: int = 0) -> int:
        """Return when a warp issued the first instruction behind a clock."""
        return min(span.start for span in self.spans(str(warp)) if span.name == ISSUE and span.start > clock)


@cache
def cubin_of(text: str, target: str = "sm_90a") -> bytes:
    """Return the cubin of a PTX text; skip the test without ptxas."""
    cubin = assemble(text.replace("sm_90a", target), target)
    if cubin is None:
        pytest.skip("ptxas is not installed")
    return cubin


def timed(kernel: Kernel, *args: Argument, setting: Setting = WARM, of: Constants = H100, edit: Edit = str) -> Timed:
    """Run a kernel on the clock. edit: changes the text of its machine code."""
    clock, listing, report = executed(kernel, *args, setting=setting, of=of, edit=edit)
    assert not report.findings, report.findings
    return Timed(listing, clock.result(), {ins.address: ins for ins in listing.instructions})


def executed(kernel: Kernel, *args: Argument, setting: Setting, of: Constants, edit: Edit) -> tuple[KernelClock, Listing, Report]:
    """Run a kernel, and return its clock before it has run to the end."""
    cubin = cubin_of(kernel.text(list(args)), f"sm_{of.arch.removeprefix('sm')}a")
    text = edit(disassemble(cubin))
    listing = read_listing(text)
    module = load_machine_code(cubin, text, is_traced=True)
    memory = GlobalMemory()
    for index, arg in enumerate(args):
        if isinstance(arg, np.ndarray):
            memory.add(f"array{index}", arg.ctypes.data, arg.nbytes)
    values = [arg if isinstance(arg, TensorMap) else struct.pack("<Q", arg.ctypes.data) for arg in args]
    shape, cluster = (kernel.threads, 1, 1), (kernel.cluster, 1, 1)
    launch = Launch(module, "k", cluster, shape, cluster, kernel.smem, values, kernel.names)
    clock = KernelClock(listing, kernel.cluster, kernel.threads // 32, of, setting)
    trace = MachineTrace(launch.target.flow.blocks)
    clock.attach(trace)
    return clock, listing, run(launch, memory, POLICY, trace)


def stalls_between(code: Sequence[SassInstruction], first: int, last: int) -> int:
    """Return the stall counts of the instructions from one index to before another."""
    return sum(max(1, ins.control.stall) for ins in code[first:last])


def wait(label: str, offset: int, parity: int) -> str:
    """Return a loop that waits for a phase."""
    return f"{label}: mbarrier.try_wait.parity.shared.b64 %p22, [%r100+{offset}], {parity}; @!%p22 bra {label};\n"


def arrive(offset: int) -> str:
    """Return the arrival of every thread."""
    return f"mbarrier.arrive.shared.b64 %rd9, [%r100+{offset}];\n"


def words(number: int = 128) -> np.ndarray:
    """Return words of zeros."""
    return aligned(number, np.uint32)
