"""Command `cute-mla simulate`: any kernel, ours or not, on the simulated device."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .options import check_writable, write_file
from .output import print_table
from .timeline import write_launch_timeline

if TYPE_CHECKING:
    from cute_mla.simulator.engine.simulate import Outcome

_SCHEDULES = ("round_robin", "lazy", "random", "adversarial")
_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
_OUT = click.Path(dir_okay=False, path_type=Path)


@click.command()
@click.argument("code", type=_FILE)
@click.option(
    "--launch", type=_FILE, required=True, help="JSON file with grid, block, buffers, parameters and what buffers must hold after."
)
@click.option(
    "--schedule", "schedules", type=click.Choice(_SCHEDULES), multiple=True, show_default="all", help="Orders of warps and copies."
)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of random and adversarial.")
@click.option(
    "--most-instructions", type=click.IntRange(min=1), default=100_000_000, show_default=True, help="Warp instructions that end a run."
)
@click.option("--json", "json_path", type=_OUT, help="Also write findings and differences to a file.")
@click.option("--timeline", type=_OUT, help="Also time the first cluster, of a cubin, and write a JSON trace for ui.perfetto.dev.")
def simulate(
    code: Path,
    launch: Path,
    schedules: tuple[str, ...],
    seed: int,
    most_instructions: int,
    json_path: Path | None,
    timeline: Path | None,
) -> None:
    """Run CODE, a cubin or PTX text, on the simulated device.

    Exit 1 if a run has findings, or leaves a buffer that does not hold what the launch file expects.
    """
    from cute_mla.simulator.engine.launch_file import read_launch_file
    from cute_mla.simulator.engine.simulate import ELF

    check_writable("--json", json_path)
    check_writable("--timeline", timeline)
    if timeline is not None and not code.read_bytes().startswith(ELF):
        raise click.UsageError(f"--timeline needs machine code, which has the time of each instruction; {code} is not a cubin")
    outcomes = _run(code, launch, schedules or _SCHEDULES, seed, most_instructions)
    for name, outcome in outcomes.items():
        for finding in outcome.report.findings:
            click.echo(f"{name}: {finding}")
        for difference in outcome.differences:
            click.echo(f"{name}: {difference}")
    rows = [
        (name, len(outcome.report.findings), len(outcome.differences), outcome.report.instructions, f"{outcome.report.seconds:.2f}")
        for name, outcome in outcomes.items()
    ]
    print_table(("schedule", "findings", "buffers that differ", "warp instructions", "seconds"), rows)
    if json_path is not None:
        write_file(json_path, json.dumps({name: _as_json(outcome) for name, outcome in outcomes.items()}, indent=1) + "\n")
    if timeline is not None:
        write_launch_timeline(timeline, code.read_bytes(), read_launch_file(launch), most_instructions)
    if not all(outcome.ok for outcome in outcomes.values()):
        raise SystemExit(1)


def _run(code: Path, launch: Path, schedules: Sequence[str], seed: int, most_instructions: int) -> dict[str, Outcome]:
    """Run a launch under each schedule, over buffers as its file describes them. ClickException for what cannot be loaded or launched."""
    from cute_mla.simulator import Policy, SimulationError
    from cute_mla.simulator.engine.launch_file import LaunchFileError, read_launch_file
    from cute_mla.simulator.engine.simulate import load_code, simulate_file
    from cute_mla.simulator.sass.cubin import CubinError

    policies = {name: replace(Policy.named(name, seed), most_instructions=most_instructions) for name in schedules}
    try:
        module = load_code(code.read_bytes(), read_launch_file(launch).kernel)
        # the file is read for each run, which changes the buffers
        return {name: simulate_file(module, read_launch_file(launch), policy) for name, policy in policies.items()}
    except LaunchFileError as error:
        raise click.ClickException(str(error)) from error
    except (CubinError, SimulationError) as error:
        raise click.ClickException(f"{code}: {error}") from error
    except OSError as error:
        raise click.ClickException(f"cannot read {code}: {error.strerror}") from error


def _as_json(outcome: Outcome) -> dict[str, Any]:
    findings = [asdict(finding) for finding in outcome.report.findings]
    return {"findings": findings, "differences": [*outcome.differences], "instructions": outcome.report.instructions}
