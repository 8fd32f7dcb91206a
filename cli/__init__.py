"""Command line `cute-mla`, one module a subcommand. A subcommand's module is imported only when it is called, to start fast."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import click

from cute_mla import __version__
from cute_mla.runtime.errors import ArtifactError, DeviceError

_HELP_OF = {
    "build": "Compile the closed list of kernels into cubins, PTX and the manifest.",
    "verify": "Run cases of every kernel and compare with the reference, on a GPU or on the simulated device.",
    "profile": "Report on the built kernels, and time them if there is a GPU.",
    "show": "Print the built kernels, one kernel, the environment, or what is supported.",
}


class LazyGroup(click.Group):
    """Group that imports the command NAME as cute_mla.cli.NAME.NAME on demand."""

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
        """Run a command. An ArtifactError or DeviceError becomes one line on stderr and exit code 1."""
        try:
            return super().invoke(ctx)
        except (ArtifactError, DeviceError) as error:
            raise click.ClickException(str(error)) from error


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.version_option(__version__, prog_name="cute-mla")
def commands() -> None:
    """MLA kernels compiled ahead of time and verified on any machine.

    Exit codes: 0 success, 1 failure, 2 wrong usage.
    """


def main() -> None:
    """Run the console script."""
    commands(prog_name="cute-mla")
