"""Parallel build of kernels into a folder of artefacts: cubins, PTX and the manifest.

Each kernel is compiled in a separate process, so that state of another compilation cannot reach its bytes. The processes are forked from
one that has imported the DSL and has compiled nothing: the import takes longer than most kernels. One build at a time writes to a folder,
and a kernel's files are moved in only after the kernel has passed every gate.
"""

from __future__ import annotations

import fcntl
import hashlib
import multiprocessing
import os
import shutil
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from cute_mla.kernels.definition import KernelDefinition
from cute_mla.manifest import KernelEntry, Manifest, ManifestError, read_verified
from cute_mla.simulator.findings import SassError
from cute_mla.simulator.sass.control_codes import hazards
from cute_mla.simulator.sass.cubin import CubinError, read_cubin
from cute_mla.simulator.sass.disassembler import disassemble
from cute_mla.simulator.sass.exposed_loads import exposed_loads
from cute_mla.simulator.sass.listing import Listing, read_listing
from cute_mla.spec.arch import ARCHS

from .compile import Compiled, compile_source
from .fingerprint import fingerprint
from .gates import Evidence, GateError, check
from .opcode_counts import by_mnemonic
from .ptx import read_ptx
from .sass import count_opcodes, count_overlap
from .tools import ToolError, assemble, assembler_version, tool_versions
from .variants import OPS, Variant, closed_variants, seconds_of

BUILT = "built"
UP_TO_DATE = "up to date"
FAILED = "failed"

REASSEMBLED = "reassembly"  # key in KernelEntry.tools
_EQUAL = "equal"
_NOT_CHECKED = "not checked"

_LOCK_NAME = ".lock"
_STAGING_PREFIX = ".build-"


@dataclass(frozen=True)
class KernelReport:
    """Outcome of one kernel. entry: its manifest entry; None if the kernel failed, with the reason in error."""

    name: str
    status: str
    seconds: float
    entry: KernelEntry | None = None
    error: str = ""


@dataclass(frozen=True)
class BuildReport:
    """Outcome of a build. kernels: in the order of the closed list."""

    folder: Path
    kernels: tuple[KernelReport, ...]
    seconds: float

    @property
    def errors(self) -> tuple[str, ...]:
        """Reasons of the kernels that failed."""
        return tuple(kernel.error for kernel in self.kernels if kernel.status == FAILED)


@dataclass(frozen=True)
class Progress:
    """Functions that a build calls. begin: takes the kernels that it will compile, in order, and the number of processes at a time.

    end: takes the report of each of these kernels as it ends.
    """

    begin: Callable[[Sequence[Variant], int], None] = lambda variants, jobs: None
    end: Callable[[KernelReport], None] = lambda report: None


NO_PROGRESS = Progress()


def build_all(archs: Sequence[str], ops: Sequence[str], jobs: int | None, out: Path, progress: Progress = NO_PROGRESS) -> BuildReport:
    """Build the closed list of these architectures and ops. ValueError for an unknown name, ToolError without the DSL.

    jobs: processes at a time; default: one per CPU. A failed kernel is in the report and does not stop the others.
    """
    for arch in archs:
        if arch not in ARCHS:
            raise ValueError(f"unknown architecture {arch!r}; supported: {', '.join(ARCHS)}")
    variants = tuple(variant for arch in archs for variant in closed_variants(ARCHS[arch], ops))
    complete = tuple(archs) if set(ops) == set(OPS) else ()
    return build_variants(variants, jobs, out, progress, prune_archs=complete)


def build_variants(
    variants: Sequence[Variant], jobs: int | None, out: Path, progress: Progress = NO_PROGRESS, prune_archs: Sequence[str] = ()
) -> BuildReport:
    """Build these variants into a folder. ToolError if the DSL is not installed.

    prune_archs: architectures whose other kernels are removed from the folder.
    """
    begin = time.perf_counter()
    if find_spec("cutlass") is None:
        raise ToolError("the CuTe DSL is not installed; install the build extra: pip install 'cute-mla[build]'")
    out.mkdir(parents=True, exist_ok=True)
    reports: dict[str, KernelReport] = {}
    with _locked(out), _staging(out) as staging:
        intact = {name: entry for name, entry in (_manifest_entries(out) or {}).items() if _is_intact(out, entry)}
        fingerprints = {variant.name: fingerprint(variant) for variant in variants}
        stale = []
        for variant in variants:
            entry = intact.get(variant.name)
            if entry is not None and entry.fingerprint == fingerprints[variant.name]:
                reports[variant.name] = KernelReport(variant.name, UP_TO_DATE, 0.0, entry)
            else:
                stale.append(variant)
        stale.sort(key=seconds_of, reverse=True)
        processes = min(jobs or os.cpu_count() or 1, max(len(stale), 1))
        if stale:
            progress.begin(stale, processes)
        for report in _build_in_processes(stale, fingerprints, staging, processes):
            reports[report.name] = report
            progress.end(report)
        _install(out, staging, intact, variants, reports, prune_archs)
    return BuildReport(out, tuple(reports[variant.name] for variant in variants), time.perf_counter() - begin)


@contextmanager
def _locked(out: Path) -> Iterator[None]:
    """Hold the lock of the folder; wait until no other build writes to it."""
    with (out / _LOCK_NAME).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextmanager
def _staging(out: Path) -> Iterator[Path]:
    """Make a folder on the same file system, so that files move atomically. Folders of killed builds are removed."""
    for leftover in out.glob(f"{_STAGING_PREFIX}*"):
        shutil.rmtree(leftover)
    with tempfile.TemporaryDirectory(prefix=_STAGING_PREFIX, dir=out) as folder:
        yield Path(folder)


def _manifest_entries(out: Path) -> dict[str, KernelEntry] | None:
    """Return the entries of the manifest; None if it is missing or unreadable, in which case this build replaces it."""
    try:
        return Manifest.load(out).kernels
    except ManifestError:
        return None


def _is_intact(out: Path, entry: KernelEntry) -> bool:
    """Return whether an entry's files exist with the hashes of the manifest."""
    for name, sha256 in ((entry.cubin, entry.cubin_sha256), (entry.ptx, entry.ptx_sha256)):
        try:
            read_verified(out / name, sha256)
        except ManifestError:
            return False
    return True


def _build_in_processes(variants: Sequence[Variant], fingerprints: dict[str, str], staging: Path, jobs: int) -> Iterator[KernelReport]:
    """Build the variants, each in a new process; yield the reports as they finish."""
    if not variants:
        return
    others = set(multiprocessing.active_children())
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["cutlass.cute", __name__])
    pool = ProcessPoolExecutor(
        jobs, mp_context=context, max_tasks_per_child=1, initializer=signal.signal, initargs=(signal.SIGINT, signal.SIG_IGN)
    )
    try:
        futures: dict[Future[KernelReport], Variant] = {
            pool.submit(build_one, variant, fingerprints[variant.name], staging): variant for variant in variants
        }
        for future in as_completed(futures):
            name = futures[future].name
            try:
                yield future.result()
            except Exception as error:  # a kernel's source may raise anything; the other kernels continue
                yield KernelReport(name, FAILED, 0.0, error=f"{name}: {type(error).__name__}: {error}")
    except BaseException:  # such as Ctrl-C, which the processes ignore
        for process in set(multiprocessing.active_children()) - others:
            process.kill()
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def build_one(variant: Variant, fingerprint_: str, folder: Path) -> KernelReport:
    """Compile, inspect and check one kernel, and write its files into the folder. Failures are in the report."""
    begin = time.perf_counter()
    try:
        source = variant.source()
        compiled = compile_source(source, variant.arch)
        evidence = collect_evidence(variant, source, compiled)
        check(evidence)
    except GateError as error:
        return KernelReport(variant.name, FAILED, time.perf_counter() - begin, error=str(error))
    except (ToolError, CubinError, SassError) as error:
        return KernelReport(variant.name, FAILED, time.perf_counter() - begin, error=f"{variant.name}: {error}")
    entry = _entry(variant, source, compiled, evidence)
    (folder / entry.cubin).write_bytes(compiled.cubin)
    (folder / entry.ptx).write_text(compiled.ptx)
    entry = replace(entry, fingerprint=fingerprint_)
    return KernelReport(variant.name, BUILT, time.perf_counter() - begin, entry)


def _findings(listing: Listing) -> tuple[tuple[str, ...], Counter[str]]:
    """Return the hazards of machine code and its exposed loads by opcode; where an instruction is unknown, that as a hazard."""
    try:
        return tuple(map(str, hazards(listing))), Counter(found.load.opcode for found in exposed_loads(listing))
    except SassError as error:
        return (str(error),), Counter()


def collect_evidence(variant: Variant, source: KernelDefinition, compiled: Compiled) -> Evidence:
    """Collect the input of the gates. The PTX is assembled again if ptxas of the DSL's own release is installed."""
    cubin = read_cubin(compiled.cubin)
    listing = read_listing(disassemble(compiled.cubin))
    found, exposed = _findings(listing)
    again = assemble(compiled.ptx, variant.arch.gpu_arch) if assembler_version() == cubin.tool else None
    return Evidence(
        kernel=variant.name,
        arch=variant.arch,
        params=source.params,
        block=source.block,
        smem_bytes=source.smem_bytes,
        tmem_columns=source.tmem_columns,
        expected=source.expected,
        ptx=read_ptx(compiled.ptx),
        cubin=cubin,
        sass=count_opcodes(listing),
        overlapped=source.overlapped,
        overlap=count_overlap(listing),
        hazards=found,
        exposed=exposed,
        reassembled=None if again is None else read_cubin(again),
    )


def _entry(variant: Variant, source: KernelDefinition, compiled: Compiled, evidence: Evidence) -> KernelEntry:
    config: dict[str, Any] = asdict(source.config)  # type: ignore[call-overload]  # every config is a dataclass
    return KernelEntry(
        name=variant.name,
        op=variant.op,
        arch=variant.arch.name,
        config=config,
        entry=compiled.entry,
        cubin=f"{variant.name}.cubin",
        cubin_sha256=hashlib.sha256(compiled.cubin).hexdigest(),
        ptx=f"{variant.name}.ptx",
        ptx_sha256=hashlib.sha256(compiled.ptx.encode()).hexdigest(),
        params=source.params,
        block=source.block,
        cluster=source.cluster,
        smem_bytes=source.smem_bytes,
        tmem_columns=source.tmem_columns,
        registers=evidence.cubin.registers,
        stack_bytes=evidence.cubin.stack_bytes,
        fingerprint="",
        barriers=source.barriers,
        named_barriers=source.named_barriers,
        roles=source.roles,
        instructions=by_mnemonic(evidence.sass),
        tools={
            **tool_versions(),
            "ptxas": evidence.cubin.tool,
            REASSEMBLED: _NOT_CHECKED if evidence.reassembled is None else _EQUAL,
        },
    )


def _install(
    out: Path,
    staging: Path,
    intact: dict[str, KernelEntry],
    variants: Sequence[Variant],
    reports: dict[str, KernelReport],
    prune_archs: Sequence[str],
) -> None:
    """Move the new files in, then write the manifest. A failed kernel loses its old entry, which other sources have made."""
    requested = {variant.name for variant in variants}
    entries = {name: entry for name, entry in intact.items() if name not in requested and entry.arch not in prune_archs}
    for report in reports.values():
        if report.entry is None:
            continue
        entries[report.name] = report.entry
        if report.status == BUILT:
            for name in (report.entry.cubin, report.entry.ptx):
                (staging / name).replace(out / name)
    if entries != _manifest_entries(out):
        Manifest(entries).save(out)
    named = {name for entry in entries.values() for name in (entry.cubin, entry.ptx)}
    for path in (*out.glob("*.cubin"), *out.glob("*.ptx")):
        if path.name not in named:
            path.unlink()
