"""cute-mla build: the closed list of variants -> cubins, PTX and manifest."""

from __future__ import annotations

from pathlib import Path

import click
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from cute_mla.aot_build.build import FAILED, REASSEMBLED, BuildReport, KernelReport, build_all
from cute_mla.aot_build.tools import ToolError
from cute_mla.aot_build.variants import OPS
from cute_mla.runtime.library import artifacts_folder
from cute_mla.spec.arch import ARCHS

from .output import is_terminal, print_table

_COLUMNS = ("kernel", "status", "seconds", "registers", "stack", "smem", "tmem", "MMA", "PTX = cubin")


@click.command()
@click.option("--arch", type=click.Choice([*ARCHS, "all"]), default="all", show_default=True, help="Architecture to build for.")
@click.option("--op", "ops", type=click.Choice(OPS), multiple=True, help="Only this op; may be repeated. Default: all.")
@click.option("--jobs", type=click.IntRange(min=1), help="Kernels compiled at a time. Default: one per CPU.")
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), help="Folder to build into. Default: where they are loaded from.")
def build(arch: str, ops: tuple[str, ...], jobs: int | None, out: Path | None) -> None:
    """Compile the closed list of kernels. What is up to date is left alone; a kernel that fails a gate does not ship."""
    archs = list(ARCHS) if arch == "all" else [arch]
    try:
        report = _build(archs, ops or OPS, jobs, out or artifacts_folder())
    except ToolError as error:
        raise click.ClickException(str(error)) from error
    print_table(_COLUMNS, [_row(kernel) for kernel in report.kernels])
    failed = [kernel for kernel in report.kernels if kernel.status == FAILED]
    click.echo(f"{len(report.kernels) - len(failed)} of {len(report.kernels)} kernels in {report.folder}, {report.seconds:.1f} s")
    for kernel in failed:
        click.echo(kernel.error, err=True)
    if failed:
        raise SystemExit(1)


def _build(archs: list[str], ops: tuple[str, ...], jobs: int | None, out: Path) -> BuildReport:
    """Builds, and shows each kernel as it is finished."""
    if not is_terminal():
        return build_all(archs, ops, jobs, out, lambda kernel, done, total: click.echo(f"[{done}/{total}] {kernel.name}: {kernel.status}"))
    columns = (TextColumn("build"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, transient=True) as progress:
        task = progress.add_task("", total=None)

        def finished(kernel: KernelReport, done: int, total: int) -> None:
            progress.update(task, completed=done, total=total, description=f"{kernel.name}: {kernel.status}")

        return build_all(archs, ops, jobs, out, finished)


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
