"""Command `cute-mla build`: compiles the closed list of variants to cubins, PTX and the manifest."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import click
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as ProgressBar

from cute_mla.aot_build.build import FAILED, REASSEMBLED, BuildReport, KernelReport, Progress, build_all, build_variants
from cute_mla.aot_build.tools import ToolError
from cute_mla.aot_build.variants import OPS, Variant, closed_variants
from cute_mla.runtime.artifacts import artifacts_folder
from cute_mla.spec.arch import ARCHS

from .output import is_terminal, print_table

_COLUMNS = ("kernel", "status", "seconds", "registers", "stack", "smem", "tmem", "MMA", "PTX = cubin")


@click.command()
@click.option("--arch", type=click.Choice([*ARCHS, "all"]), default="all", show_default=True, help="Architecture to build for.")
@click.option("--op", "ops", type=click.Choice(OPS), multiple=True, help="Build only this op; may be repeated. Default: all.")
@click.option("--kernel", "kernels", multiple=True, help="Build only the kernel with this manifest name; may be repeated.")
@click.option("--jobs", type=click.IntRange(min=1), help="Kernels compiled at a time. Default: one per CPU.")
@click.option(
    "--out", type=click.Path(file_okay=False, path_type=Path), help="Folder to build into. Default: the folder they are loaded from."
)
def build(arch: str, ops: tuple[str, ...], kernels: tuple[str, ...], jobs: int | None, out: Path | None) -> None:
    """Compile the closed list of kernels. Kernels that are up to date are skipped; a kernel that fails a gate does not ship."""
    archs = list(ARCHS) if arch == "all" else [arch]
    folder = out or artifacts_folder()
    try:
        if kernels:
            chosen = _chosen(archs, ops or OPS, kernels)
            report = _run_with_progress(lambda progress: build_variants(chosen, jobs, folder, progress))
        else:
            report = _run_with_progress(lambda progress: build_all(archs, ops or OPS, jobs, folder, progress))
    except ToolError as error:
        raise click.ClickException(str(error)) from error
    print_table(_COLUMNS, [_row(kernel) for kernel in report.kernels])
    failed = [kernel for kernel in report.kernels if kernel.status == FAILED]
    click.echo(f"{len(report.kernels) - len(failed)} of {len(report.kernels)} kernels in {report.folder}, {report.seconds:.1f} s")
    for kernel in failed:
        click.echo(kernel.error, err=True)
    if failed:
        raise SystemExit(1)


def _chosen(archs: list[str], ops: tuple[str, ...], kernels: tuple[str, ...]) -> list[Variant]:
    """Return the variants with these names. UsageError for a name that is not on the closed list of these architectures and ops."""
    listed = {variant.name: variant for arch in archs for variant in closed_variants(ARCHS[arch], ops)}
    for name in kernels:
        if name not in listed:
            raise click.UsageError(f"--kernel: there is no {name} among the {len(listed)} kernels of {', '.join(archs)}: {', '.join(ops)}")
    return [listed[name] for name in dict.fromkeys(kernels)]


def _run_with_progress(run: Callable[[Progress], BuildReport]) -> BuildReport:
    """Run a build, and show each kernel as it finishes."""
    if not is_terminal():
        return run(lambda kernel, done, total: click.echo(f"[{done}/{total}] {kernel.name}: {kernel.status}"))
    columns = (TextColumn("build"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with ProgressBar(*columns, transient=True) as bar:
        task = bar.add_task("", total=None)

        def finished(kernel: KernelReport, done: int, total: int) -> None:
            bar.update(task, completed=done, total=total, description=f"{kernel.name}: {kernel.status}")

        return run(finished)


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
