"""Command line `cute-mla`, one module a subcommand. A subcommand's module is imported only when it is called, to start fast."""

from __future__ import annotations

import os
import sys
from importlib import import_module
from typing import Any

import click

from cute_mla import __version__
from cute_mla.runtime.errors import ArtifactError, DeviceError

INTERRUPTED = 130  # exit code after Ctrl-C, as shells have it: 128 + SIGINT

_HELP_OF = {
    "build": "Compile the closed list of kernels into cubins, PTX and the manifest.",
    "verify": "Run cases of every kernel and compare with the reference, on a GPU or on the simulated device.",
    "profile": "Report on the built kernels, and time them if there is a GPU.",
    "simulate": "Run any kernel, a cubin or PTX text, on the simulated device.",
    "convert": "Convert the checkpoint of a Llama or Qwen2 style model to one with Multi-head Latent Attention.",
    "show": "Print the built kernels, one kernel, the environment, or what is supported.",
}


class LazyGroup(click.Group):
    """Group that imports the command NAME as cute_mla.cli.NAME.NAME on demand."""

    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command that the arguments name. UsageError for an unknown name, with the nearest ones."""
        if args and not args[0].startswith("-") and self.get_command(ctx, args[0]) is None:
            from .options import did_you_mean

            ctx.fail(f"no command {args[0]}; commands: {', '.join(_HELP_OF)}{did_you_mean(args[0], _HELP_OF)}")
        return super().resolve_command(ctx, args)

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of the commands, in the order of their usual use."""
        del ctx
        return list(_HELP_OF)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import a command. Returns None for an unknown name."""
        del ctx
        if cmd_name not in _HELP_OF:
            return None
        command: click.Command = getattr(import_module(f"{__name__}.{cmd_name}"), cmd_name)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of commands for --help without importing them."""
        del ctx
        with formatter.section("Commands"):
            formatter.write_dl(list(_HELP_OF.items()))

    def invoke(self, ctx: click.Context) -> Any:
        """Run a command. Expected errors become one line on stderr and exit code 1; an interruption is exit code 130."""
        try:
            return super().invoke(ctx)
        except (ArtifactError, DeviceError) as error:
            raise click.ClickException(str(error)) from error
        except KeyboardInterrupt:
            click.echo("interrupted", err=True)
            raise SystemExit(INTERRUPTED) from None
        except OSError as error:
            if error.filename is None:
                raise  # of the output: main() ends the process
            raise click.ClickException(f"{error.filename}: {error.strerror}") from error


_SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": 120, "show_default": True}


@click.group(cls=LazyGroup, context_settings=_SETTINGS)
@click.version_option(__version__, prog_name="cute-mla")
def commands() -> None:
    """MLA kernels compiled ahead of time and verified on any machine.

    Exit codes: 0 success, 1 failure, 2 wrong usage or a path that cannot be written, 130 interrupted.
    """


def main() -> None:
    """Run the console script. Output that cannot be written, such as to a full disk, is one line on stderr and exit code 1."""
    if sys.stdout is None:  # closed by the caller, who wants none
        sys.stdout = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")
    try:
        try:
            commands(prog_name="cute-mla")
        finally:
            sys.stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is still buffered: Python flushes it once more at its exit
        if not isinstance(error, BrokenPipeError):  # nobody reads a closed pipe: no message
            click.echo(f"Error: {error.strerror}", err=True)
        raise SystemExit(1) from None
