"""Command `cute-mla show`: the built kernels, one kernel, the environment, what is supported, or which models are served."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from cute_mla.manifest import KernelEntry
from cute_mla.runtime.artifacts import Artifacts, load_artifacts
from cute_mla.spec.arch import ARCHS

from .environment import environment, table_rows
from .options import Name, did_you_mean
from .output import print_json, print_table
from .stalls import show_stalls, stalls_as_json, stalls_of

if TYPE_CHECKING:
    from cute_mla.profiles.kernel_stats.dynamic_counts import DynamicCounts


@click.command()
@click.argument("what", type=Name(["manifest", "kernel", "env", "support", "models"]), default="manifest")
@click.argument("name", required=False)
@click.option("--counts", is_flag=True, help="With kernel: run it on the simulated device and count its instructions (takes seconds).")
@click.option(
    "--code",
    type=Name(["sass", "ptx"]),
    default="sass",
    show_default=True,
    help="What --counts counts: the machine code (SASS) of the cubin, which takes nvdisasm to read, or the PTX.",
)
@click.option("--stalls", is_flag=True, help="With kernel: predict which of its instructions wait, and for how long (takes a minute).")
@click.option("--gpu", metavar="NAME", show_default="H200, B200 or RTX PRO 6000", help="With --stalls: the GPU.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def show(what: str, name: str | None, counts: bool, code: str, stalls: bool, gpu: str | None, as_json: bool) -> None:
    """Print the manifest (the default), one kernel by NAME, the environment, what this version supports, or the models that it serves."""
    if (what == "kernel") != (name is not None):
        raise click.UsageError("`show kernel` takes the name of one kernel" if what == "kernel" else f"`show {what}` takes no name")
    if counts and what != "kernel":
        raise click.UsageError("--counts needs one kernel: `show kernel NAME --counts`")
    if stalls and (what != "kernel" or counts):
        raise click.UsageError("--stalls needs one kernel, without --counts: `show kernel NAME --stalls`")
    if gpu is not None and not stalls:
        raise click.UsageError("--gpu needs --stalls: `show kernel NAME --stalls --gpu NAME`")
    if what == "env":
        _show_env(as_json)
        return
    if what in ("support", "models"):
        (_show_support if what == "support" else _show_models)(as_json)
        return
    artifacts = load_artifacts()
    if name is None:
        _show_manifest(artifacts, as_json)
    elif stalls:
        _show_stalls(_entry(artifacts, name), gpu, as_json)
    else:
        _show_kernel(_entry(artifacts, name), code if counts else None, as_json)


def _show_manifest(artifacts: Artifacts, as_json: bool) -> None:
    entries = [entry for _, entry in sorted(artifacts.manifest.kernels.items())]
    if as_json:
        kernels = {entry.name: asdict(entry) for entry in entries}
        print_json({"folder": str(artifacts.folder), "kernels": kernels, "proof": _proof(entries)})
        return
    columns = ("kernel", "registers", "stack", "smem", "tmem", "block", "cluster", "params", "instructions", "MMA", "cubin sha256")
    print_table(columns, [_summary(entry) for entry in entries])
    click.echo(f"{len(entries)} kernels in {artifacts.folder}")
    for sentence in _proof(entries).values():
        click.echo(sentence)


def _proof(entries: Iterable[KernelEntry]) -> dict[str, str]:
    """Return the verification status of the kernels, by architecture."""
    built = {entry.arch for entry in entries}
    return {arch.name: arch.proof for arch in ARCHS.values() if arch.name in built}


def _summary(entry: KernelEntry) -> tuple[object, ...]:
    return (
        entry.name,
        entry.registers,
        entry.stack_bytes,
        entry.smem_bytes,
        entry.tmem_columns,
        "x".join(map(str, entry.block)),
        "x".join(map(str, entry.cluster)),
        len(entry.params),
        sum(entry.instructions.values()),
        entry.matrix_products,
        entry.cubin_sha256[:12],
    )


def _entry(artifacts: Artifacts, name: str) -> KernelEntry:
    entry = artifacts.manifest.kernels.get(name)
    if entry is None:
        built = artifacts.manifest.kernels
        listed = f"; `cute-mla show` lists the {len(built)} that are built{did_you_mean(name, sorted(built))}"
        raise click.UsageError(f"no kernel {name} in {artifacts.folder}{listed}")
    return entry


def _show_kernel(entry: KernelEntry, code: str | None, as_json: bool) -> None:
    fields: dict[str, Any] = {**asdict(entry), "proof": ARCHS[entry.arch].proof}
    counts = None if code is None else _executed(entry, code)
    if as_json:
        print_json(fields if counts is None else {**fields, "executed": asdict(counts)})
        return
    del fields["params"]
    lists = {key: fields.pop(key) for key in ("barriers", "named_barriers", "roles")}
    del fields["instructions"]
    for key in ("config", "tools"):
        fields[key] = ", ".join(f"{part}={value}" for part, value in fields[key].items())
    print_table(("field", "value"), list(fields.items()))
    click.echo()
    print_table(("parameter", "kind", "bytes"), [(param.name, param.kind.value, param.size) for param in entry.params])
    for key, members in lists.items():
        if members:
            click.echo()
            print_table((key.replace("_", " "), *list(members[0])[1:]), [tuple(member.values()) for member in members])
    click.echo()
    mix = [(-count, mnemonic) for mnemonic, count in entry.instructions.items()]
    print_table(("instruction", "count"), [(mnemonic, -negative) for negative, mnemonic in sorted(mix)])
    if counts is not None:
        click.echo()
        _show_counts(counts)


def _show_stalls(entry: KernelEntry, gpu: str | None, as_json: bool) -> None:
    report = stalls_of(entry, gpu)
    if as_json:
        print_json(stalls_as_json(report))
    else:
        show_stalls(report)


def _executed(entry: KernelEntry, code: str) -> DynamicCounts:
    from cute_mla.profiles.kernel_stats.dynamic_counts import dynamic_counts
    from cute_mla.simulator.findings import SassError, UnsupportedInstruction

    try:
        counts = dynamic_counts(entry, code)
    except (SassError, UnsupportedInstruction) as error:
        raise click.ClickException(f"{error}; --code ptx counts the PTX") from error
    if counts is None:
        raise click.UsageError(f"--counts: {entry.name} does not walk over keys")
    return counts


def _show_counts(counts: DynamicCounts) -> None:
    roles = list(counts.slope)
    classes = sorted({name for role in roles for name in counts.slope[role]}, key=lambda name: -_of_class(counts, name))
    rows: list[tuple[object, ...]] = [
        (name, round(_of_class(counts, name), 1), *(round(counts.slope[role].get(name, 0), 1) for role in roles)) for name in classes
    ]
    of_roles = (round(sum(counts.slope[role].values()), 1) for role in roles)
    rows.append(("all, per 64 keys of 64 rows", round(counts.slope_total, 1), *of_roles))
    rows.append(("fixed", round(counts.fixed_total), *(round(counts.fixed[role]) for role in roles)))
    print_table((f"warp instructions ({counts.code.upper()})", "all roles", *roles), rows)
    if counts.peer is not None:
        peer = counts.peer
        shares = f"{counts.slope_total / peer.slope:.2f} and {counts.fixed_total / peer.fixed:.2f} of it"
        click.echo(f"FlashMLA, {peer.title}: {peer.slope:g} and {peer.fixed:g}; this kernel: {shares}")


def _of_class(counts: DynamicCounts, name: str) -> float:
    return sum(classes.get(name, 0) for classes in counts.slope.values())


def _show_env(as_json: bool) -> None:
    found = environment()
    if as_json:
        print_json(found)
    else:
        print_table(("what", "found"), table_rows(found))


def _show_support(as_json: bool) -> None:
    from .support_table import kernels, markdown, options

    if as_json:
        print_json({"kernels": dict(kernels()), "proof": {arch.name: arch.proof for arch in ARCHS.values()}, "options": dict(options())})
    else:
        click.echo(markdown(), nl=False)


def _show_models(as_json: bool) -> None:
    from .served_models import HEADS, markdown, served_models

    if as_json:
        print_json({"models": [dict(zip(HEADS, cells, strict=True)) for cells in served_models()]})
    else:
        click.echo(markdown(), nl=False)
