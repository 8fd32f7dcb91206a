"""Command `cute-mla convert`: converts a Llama or Qwen2 style checkpoint to a DeepSeek-V3 checkpoint."""

from __future__ import annotations

import time
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cute_mla.convert import ConvertOptions, convert_checkpoint, read_tokens
from cute_mla.convert.calibration import LENGTH, SEQUENCES
from cute_mla.convert.options import DTYPES, METHODS, ROTATIONS, STRATEGIES, SVDS

from .options import Name, check_writable, write_file
from .output import duration, json_text

if TYPE_CHECKING:
    from cute_mla.convert import LayerReport

_DEFAULTS = ConvertOptions()
_EXISTING_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


@click.command()
@click.argument("source", metavar="IN", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.argument("out", metavar="OUT", type=click.Path(path_type=Path))
@click.option("--method", type=Name(METHODS), default=_DEFAULTS.method, help="Published method of the conversion.")
@click.option(
    "--rank", type=int, default=_DEFAULTS.rank, help="Latent columns that are used, 1 to 512; up to 256, the cache has 320 columns."
)
@click.option(
    "--calibration", type=_EXISTING_FILE, show_default="none", help="Text, or token ids in a .npy file, to keep the loss small on."
)
@click.option("--sequences", type=click.IntRange(min=1), default=SEQUENCES, help="Sequences of the calibration file that are used.")
@click.option("--length", type=click.IntRange(min=2), default=LENGTH, help="Tokens of a sequence.")
@click.option("--dtype", type=Name(DTYPES), default=_DEFAULTS.dtype, help="Dtype of the converted weights.")
@click.option(
    "--rotation", type=Name(ROTATIONS), default=_DEFAULTS.rotation, help="transmla: mix the KV heads by a unitary or a real matrix."
)
@click.option("--fold", type=int, show_default="as exact as possible", help="transmla: neighbouring frequencies treated as one.")
@click.option("--attenuation", type=float, default=_DEFAULTS.attenuation, help="transmla: weakens fast pairs without rotation; 0: not.")
@click.option("--strategy", type=Name(STRATEGIES), default=_DEFAULTS.strategy, help="mha2mla: pairs that stay rotary.")
@click.option("--svd", type=Name(SVDS), default=_DEFAULTS.svd, help="mha2mla: factorise keys and values together or apart.")
@click.option("--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), show_default="none", help="File for the report.")
def convert(source: Path, out: Path, calibration: Path | None, json_file: Path | None, **chosen: Any) -> None:
    """Convert the checkpoint in the folder IN to a DeepSeek-V3 checkpoint in the new folder OUT.

    IN has config.json and safetensors files, and is only read. An interrupted conversion goes on if the same command runs again.
    """
    check_writable("--json", json_file)
    try:
        options = ConvertOptions(**{field.name: chosen[field.name] for field in fields(ConvertOptions)})
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    begin = time.monotonic()
    try:
        tokens = None
        if calibration is not None:
            tokens = read_tokens(calibration, source, sequences=chosen["sequences"], length=chosen["length"])
        report = convert_checkpoint(source, out, options, calibration=tokens, progress=_progress)
    except (ValueError, ModuleNotFoundError) as error:
        raise click.ClickException(str(error)) from error
    click.echo(report.words(), nl=False)
    click.echo(f"{out}: {duration(time.monotonic() - begin)}")
    if json_file is not None:
        write_file(json_file, json_text(report.to_json()) + "\n")


def _progress(layer: int, layers: int, report: LayerReport) -> None:
    """Print a line on stderr for a layer that is complete."""
    losses = f"kept rotary energy {report.kept_rotary_energy:.4f}, loss by the rank {report.rank_loss:.2e}, fold {report.fold}"
    click.echo(f"[{layer + 1}/{layers}] {'exact' if report.exact else losses}", err=True)
