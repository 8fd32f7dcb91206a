"""Command `cute-mla build`: compiles the closed list of variants to cubins, PTX and the manifest."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import click

from cute_mla.aot_build.build import BUILT, FAILED, REASSEMBLED, UP_TO_DATE, BuildReport, KernelReport, Progress, build_all, build_variants
from cute_mla.aot_build.tools import ToolError
from cute_mla.aot_build.variants import OPS, Variant, closed_variants, seconds_of
from cute_mla.manifest import MANIFEST_NAME
from cute_mla.runtime.artifacts import artifacts_folder
from cute_mla.spec.arch import ARCHS
from cute_mla.spec.kernel_ops import OPS as PUBLIC_OPS

from .options import ALL, ARCH, Name, check_writable, did_you_mean
from .output import duration, print_table
from .verify import SUITES

_COLUMNS = ("kernel", "status", "seconds", "registers", "stack", "smem", "tmem", "MMA", "PTX = cubin")


@click.command()
@click.option("--arch", type=ARCH, default=ALL, help="Architecture to build for.")
@click.option("--op", "ops", type=Name(OPS), multiple=True, help="Build only this op; may be repeated. Default: all.")
@click.option("--kernel", "kernels", multiple=True, help="Build only the kernel with this manifest name; may be repeated. Default: all.")
@click.option("--suite", type=Name(SUITES), show_default="all kernels", help="Build only the kernels that this suite of verify launches.")
@click.option("--jobs", type=click.IntRange(min=1), show_default="one per CPU", help="Kernels compiled at a time.")
@click.option(
    "--out", type=click.Path(file_okay=False, path_type=Path), show_default="the folder they are loaded from", help="Folder to build into."
)
def build(arch: str, ops: tuple[str, ...], kernels: tuple[str, ...], suite: str | None, jobs: int | None, out: Path | None) -> None:
    """Compile the closed list of kernels. Kernels that are up to date are skipped; a kernel that fails a gate does not ship."""
    archs = list(ARCHS) if arch == ALL else [arch]
    check_writable("--out", out and out / MANIFEST_NAME, make_folder=True)
    folder = out or artifacts_folder()
    names = [*kernels, *(_kernels_of_suite(suite, archs, ops or OPS) if suite else ())]
    try:
        if kernels or suite:
            report = build_variants(_chosen(archs, ops or OPS, names), jobs, folder, _Shown().progress)
        else:
            report = build_all(archs, ops or OPS, jobs, folder, _Shown().progress)
    except ToolError as error:
        raise click.ClickException(str(error)) from error
    _summarise(report)
    failed = [kernel for kernel in report.kernels if kernel.status == FAILED]
    for kernel in failed:
        click.echo(kernel.error, err=True)
    if failed:
        raise SystemExit(1)


def _summarise(report: BuildReport) -> None:
    """Print a table of the kernels that were compiled, and one line for all."""
    compiled = [kernel for kernel in report.kernels if kernel.status != UP_TO_DATE]
    current = len(report.kernels) - len(compiled)
    if not compiled:
        click.echo(f"{current} kernels in {report.folder} are up to date")
        return
    print_table(_COLUMNS, [_row(kernel) for kernel in compiled])
    built = sum(kernel.status == BUILT for kernel in compiled)
    others = f", {current} were up to date" if current else ""
    click.echo(f"{built} of {len(compiled)} kernels built in {report.folder}{others}; {duration(report.seconds)}")


def _kernels_of_suite(suite: str, archs: list[str], ops: Sequence[str]) -> list[str]:
    """Return the names of the kernels of these ops that a suite launches, in the order of the closed list."""
    from cute_mla.testing.suite import suite_kernels

    launched = {kernel for arch in archs for op in PUBLIC_OPS for kernel in suite_kernels(suite, op, ARCHS[arch])}
    listed = [variant.name for arch in archs for variant in closed_variants(ARCHS[arch], ops)]
    return [name for name in listed if name in launched]


def _chosen(archs: list[str], ops: tuple[str, ...], kernels: Sequence[str]) -> list[Variant]:
    """Return the variants with these names. UsageError for a name that is not on the closed list of these architectures and ops."""
    listed = {variant.name: variant for arch in archs for variant in closed_variants(ARCHS[arch], ops)}
    for name in kernels:
        if name not in listed:
            where = f"the {len(listed)} kernels of {', '.join(archs)}: {', '.join(ops)}"
            raise click.UsageError(f"--kernel: there is no {name} among {where}{did_you_mean(name, listed)}")
    return [listed[name] for name in dict.fromkeys(kernels)]


class _Shown:
    """A build as it is shown on stderr: each kernel as it ends, with the time left by the pace so far."""

    def __init__(self) -> None:
        self.progress = Progress(self._begin, self._end)
        self._start = time.monotonic()
        self._weights: dict[str, float] = {}
        self._ended: list[str] = []
        self._jobs = 1

    def _begin(self, variants: Sequence[Variant], jobs: int) -> None:
        self._start, self._jobs = time.monotonic(), jobs
        self._weights = {variant.name: seconds_of(variant) for variant in variants}
        how = "one at a time" if jobs == 1 else f"{jobs} at a time"
        click.echo(f"building {len(variants)} kernels, {how}; each that ends says the time left", err=True)

    def _end(self, kernel: KernelReport) -> None:
        self._ended.append(kernel.name)
        running = list(self._weights.values())[len(self._ended) :][: self._jobs - 1]  # beside this one's successor, which just starts
        done = sum(self._weights[name] for name in self._ended) + sum(running) / 2
        left = (time.monotonic() - self._start) * (sum(self._weights.values()) / done - 1)
        rest = f"; about {duration(left)} left" if len(self._ended) < len(self._weights) else ""
        click.echo(f"[{len(self._ended)}/{len(self._weights)}] {kernel.name}: {kernel.status}, {kernel.seconds:.1f} s{rest}", err=True)


def _row(kernel: KernelReport) -> tuple[object, ...]:
    entry = kernel.entry
    if entry is None:
        return kernel.name, kernel.status, round(kernel.seconds, 1), None, None, None, None, None, None
    return (
        kernel.name,
        kernel.status,
        round(kernel.seconds, 1),
        entry.registers,
        entry.stack_bytes,
        entry.smem_bytes,
        entry.tmem_columns,
        entry.matrix_products,
        entry.tools[REASSEMBLED],
    )
