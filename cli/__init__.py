"""The command `cute-mla`, one file per subcommand. A command is imported when it is called, so that none pays for another."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import click

from cute_mla import __version__
from cute_mla.runtime.errors import ArtifactError, DeviceError

_HELP_OF = {
    "build": "Compile the closed list of kernels into cubins, PTX and the manifest.",
    "verify": "Run cases of every kernel and compare with the reference, on a GPU or on the simulated device.",
    "profile": "Report on the built kernels, and time them where there is a GPU.",
    "show": "Print what is built, one kernel, or the environment.",
}


class LazyGroup(click.Group):
    """Finds the command NAME as cute_mla.cli.NAME.NAME."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The commands, in the order in which they are used."""
        del ctx
        return list(_HELP_OF)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Imports a command's file. None if there is no such command."""
        del ctx
        if cmd_name not in _HELP_OF:
            return None
        command: click.Command = getattr(import_module(f"{__name__}.{cmd_name}"), cmd_name)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The list of commands in --help, without importing them."""
        del ctx
        with formatter.section("Commands"):
            formatter.write_dl(list(_HELP_OF.items()))

    def invoke(self, ctx: click.Context) -> Any:
        """Runs a command. What is wrong with artefacts or the device becomes one line and exit code 1."""
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
    """The console script."""
    commands(prog_name="cute-mla")
