"""Times of a kernel that is not ours: its cubin on the simulated device, and the clock beside it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from cute_mla.aot_build.source_lines import SourceLines
from cute_mla.simulator import Launch, Policy, SimulationError, run
from cute_mla.simulator.engine.launch_file import LaunchFile, LaunchFileError, WarpRange
from cute_mla.simulator.findings import SassError
from cute_mla.simulator.sass.cubin import CubinError, read_cubin
from cute_mla.simulator.sass.listing import read_listing, section_of
from cute_mla.simulator.sass.module import load_machine_code
from cute_mla.simulator.sass.text_cache import disassembly
from cute_mla.simulator.sass.trace import MachineTrace

from .cluster_run import ClusterRun, cluster_run, kernel_clock
from .constants import Constants, constants
from .engine import Setting, StandstillError
from .golden_clocks import GPU_OF
from .instructions import UnknownTimeError
from .kernel import KernelClock
from .recorded import Recorded, recorded

MOST_INSTRUCTIONS = 100_000_000  # of the warps of a launch that end its run
_MOST_FINDINGS = 1 << 30  # other libraries may lack fences that the simulator asks for; their launches run on


@dataclass(frozen=True)
class PeerRun:
    """A launch that has run. findings: what the simulator says of it, one line each."""

    launch: LaunchFile
    run: ClusterRun
    findings: tuple[str, ...]


@dataclass(frozen=True)
class _Clocked:
    """A launch that has been executed beside a clock."""

    kernel: str
    clock: KernelClock
    findings: tuple[str, ...]


def gpu_for(cubin: bytes, kernel: str = "") -> str:
    """Return a GPU of the clock that runs a cubin: H200, B200 or RTX PRO 6000. LaunchFileError if there is none."""
    try:
        found = _arch_of(cubin, kernel)
    except CubinError as error:
        raise LaunchFileError(str(error)) from error
    known = {arch.removeprefix("sm"): gpu for arch, gpu in GPU_OF.items()}
    if found not in known:
        raise LaunchFileError(f"the cubin is of sm_{found}; the clock knows {', '.join(f'sm_{arch} ({known[arch]})' for arch in known)}")
    return known[found]


def record_peer(cubin: bytes, launch: LaunchFile, gpu: str, most_instructions: int) -> Recorded:
    """Run a launch and keep what its first cluster does. LaunchFileError, with the reason, for one that cannot be timed."""
    found = _clocked(cubin, launch, constants(gpu), most_instructions, keeps_spans=True)
    return recorded(found.clock, launch.name, gpu, found.kernel, launch.names(), SourceLines())


def time_peer(cubin: bytes, launches: Sequence[LaunchFile], values: Constants) -> dict[str, Any]:
    """Time launches of one kernel and return their figures: clocks a block by the difference of the first and the last launch.

    LaunchFileError, with the reason, for a cubin or a launch that cannot be timed.
    """
    found = [_clocked(cubin, launch, values, MOST_INSTRUCTIONS) for launch in launches]
    return peer_figures([PeerRun(launch, cluster_run(item.clock), item.findings) for launch, item in zip(launches, found, strict=True)])


def peer_figures(runs: Sequence[PeerRun]) -> dict[str, Any]:
    """Return the figures of the launches of one kernel. use and waits are of the last launch as a whole, beside its clocks."""
    first, last = runs[0], runs[-1]
    found: dict[str, Any] = {
        "name": last.launch.name,
        "clocks": [item.run.end for item in runs],
        "blocks": [item.launch.blocks for item in runs],
        "block_clocks": None,
        "use": {unit: clocks / last.run.end for unit, clocks in last.run.busy.items()},
        "waits": {role.name: _waits(role, last.run) for role in last.launch.roles or _every_group(last.launch)},
        "findings": sorted({line for item in runs for line in item.findings}),
    }
    if first.launch.blocks is not None and last.launch.blocks is not None and first.launch.blocks != last.launch.blocks:
        found["block_clocks"] = (last.run.end - first.run.end) / (last.launch.blocks - first.launch.blocks)
    return found


def _waits(role: WarpRange, run: ClusterRun) -> dict[str, float]:
    warps = range(role.first_warp, role.first_warp + role.warps)
    causes = sorted({cause for warp, cause in run.waits if warp in warps})
    return {cause: sum(run.waits.get((warp, cause), 0) for warp in warps) / role.warps / run.end for cause in causes}


def _every_group(launch: LaunchFile) -> list[WarpRange]:
    """Return the warpgroups of a CTA, for a description without roles."""
    warps = -(-prod(launch.block) // 32)
    return [WarpRange(f"warps {first} to {min(first + 4, warps) - 1}", first, min(4, warps - first)) for first in range(0, warps, 4)]


def _clocked(cubin: bytes, peer: LaunchFile, values: Constants, most_instructions: int, keeps_spans: bool = False) -> _Clocked:
    """Run a launch and time its first cluster to the end."""
    try:
        _check_arch(cubin, peer.kernel, values)
        text = disassembly(cubin)
        module = load_machine_code(cubin, text, kernel=peer.kernel, is_traced=True)
        (entry,) = module.entries
        listing = read_listing(section_of(text, entry))
        launch = Launch(module, entry, peer.grid, peer.block, peer.cluster, peer.smem_bytes, list(peer.parameters))
        share = min(values.hbm_bytes * peer.sharing / min(prod(peer.grid), values.sm_count), float(values.l2_bytes))
        setting = Setting(share, cold=peer.cold, spans=keeps_spans)
        clock = kernel_clock(listing, prod(peer.cluster), prod(peer.block), values, setting)
        trace = MachineTrace(launch.target.flow.blocks)
        clock.attach(trace)
        policy = Policy(waits_block=True, most_findings=_MOST_FINDINGS, most_instructions=most_instructions)
        report = run(launch, peer.global_memory(), policy, trace)
        findings = tuple(str(finding).splitlines()[0] for finding in report.findings)
        try:
            clock.result()
        except StandstillError as error:
            raise LaunchFileError("; ".join([f"{peer.name} cannot be timed: {error}", *findings[:3]])) from error
        return _Clocked(entry, clock, findings)
    except (CubinError, SassError, SimulationError, UnknownTimeError) as error:
        raise LaunchFileError(f"{peer.name}: {error}") from error
    except ValueError as error:
        raise error if isinstance(error, LaunchFileError) else LaunchFileError(f"{peer.name}: {error}") from error


def _arch_of(cubin: bytes, kernel: str) -> str:
    """Return the number of the architecture that a cubin names, "" for none."""
    found = re.search(r"\bsm_(\d+)", read_cubin(cubin, kernel).options)
    return found[1] if found is not None else ""


def _check_arch(cubin: bytes, kernel: str, values: Constants) -> None:
    found, expected = _arch_of(cubin, kernel), values.arch.removeprefix("sm")
    if found not in ("", expected):
        raise LaunchFileError(f"the cubin is of sm_{found}; a {values.gpu} runs sm_{expected}")
