"""The command group: what it lists, how it fails, and that it runs without an installation."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

import cute_mla
from cute_mla.cli import LazyGroup, commands
from cute_mla.runtime.errors import ArtifactError, DeviceError
from tests.support.tree import ROOT


def test_help_lists_the_commands_without_importing_them() -> None:
    script = (
        "import sys; from click.testing import CliRunner; from cute_mla.cli import commands\n"
        "print(CliRunner().invoke(commands, ['--help']).output)\n"
        "print([name for name in ('torch', 'cutlass', 'cute_mla.cli.build') if name in sys.modules])"
    )
    output = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for command in ("build", "verify", "profile", "show"):
        assert f"\n  {command} " in output
    assert output.endswith("[]\n")


@pytest.mark.parametrize("command", ["build", "verify", "profile", "show"])
def test_every_command_has_help(command: str) -> None:
    result = CliRunner().invoke(commands, [command, "--help"])
    assert result.exit_code == 0
    assert f"Usage: commands {command}" in result.output


@pytest.mark.parametrize("arguments", [["paint"], ["--paint"], ["show", "--paint"], []])
def test_wrong_usage_is_exit_code_2(arguments: list[str]) -> None:
    assert CliRunner().invoke(commands, arguments).exit_code == 2


@pytest.mark.parametrize("error", [ArtifactError("no manifest"), DeviceError("no driver")])
def test_what_is_wrong_with_artefacts_or_the_device_is_one_line_and_exit_code_1(error: Exception) -> None:
    group = LazyGroup("group")

    @click.command()
    def fail() -> None:
        raise error

    group.get_command = lambda ctx, cmd_name: fail  # type: ignore[method-assign]
    result = CliRunner().invoke(group, ["fail"])
    assert result.exit_code == 1
    assert result.output == f"Error: {error}\n"


def test_the_module_and_the_console_script_are_one_program() -> None:
    """From another folder and with nothing installed: the tree on the path is enough."""
    script = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]["cute-mla"]
    assert script == "cute_mla.cli:main"
    result = subprocess.run(
        [sys.executable, "-m", "cute_mla.cli", "--version"],
        cwd="/",
        env={"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stdout == f"cute-mla, version {cute_mla.__version__}\n"


def test_the_folders_at_the_top_are_imported_from_the_tree() -> None:
    script = (
        "import cute_mla.cli.build as a, cute_mla.aot_build.tools as b, cute_mla.profiles as c; print(a.__file__, b.__file__, c.__file__)"
    )
    result = subprocess.run(
        [sys.executable, "-c", script], cwd="/", env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=True
    )
    found = [Path(name).resolve() for name in result.stdout.split()]
    assert found == [ROOT / "cli" / "build.py", ROOT / "aot_build" / "tools.py", ROOT / "profiles" / "__init__.py"]
