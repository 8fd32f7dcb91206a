"""The command group: what it lists, how it fails, and that it runs without an installation."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

import cute_mla
from cute_mla.cli import LazyGroup, commands
from cute_mla.cli.options import ARCH, write_file
from cute_mla.runtime.errors import ArtifactError, DeviceError
from tests.support.tree import ROOT


def test_help_lists_the_commands_without_importing_them() -> None:
    script = (
        "import sys; from click.testing import CliRunner; from cute_mla.cli import commands\n"
        "print(CliRunner().invoke(commands, ['--help']).output)\n"
        "print([name for name in ('torch', 'cutlass', 'cute_mla.cli.build') if name in sys.modules])"
    )
    output = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for command in ("build", "verify", "profile", "convert", "show"):
        assert f"\n  {command} " in output
    assert output.endswith("[]\n")


@pytest.mark.parametrize("command", ["build", "verify", "profile", "convert", "show"])
def test_every_command_has_help(command: str) -> None:
    result = CliRunner().invoke(commands, [command, "--help"])
    assert result.exit_code == 0
    assert f"Usage: commands {command}" in result.output


@pytest.mark.parametrize("arguments", [["paint"], ["--paint"], ["show", "--paint"], []])
def test_wrong_usage_is_exit_code_2(arguments: list[str]) -> None:
    assert CliRunner().invoke(commands, arguments).exit_code == 2


@pytest.mark.parametrize("command", ["build", "verify", "profile", "convert", "show"])
def test_help_gives_the_default_of_every_option(command: str) -> None:
    loaded = commands.get_command(click.Context(commands), command)
    assert loaded is not None
    context = click.Context(loaded, parent=click.Context(commands, **commands.context_settings))
    for option in loaded.params:
        if isinstance(option, click.Option) and not option.is_flag and not option.is_eager:
            record = option.get_help_record(context)
            assert record is not None
            assert "default" in record[1].lower(), f"--{option.name}: {record[1]}"


@pytest.mark.parametrize(
    ("arguments", "near"),
    [
        (["verfy"], "verify"),
        (["verify", "--op", "dense_decod"], "dense_decode"),
        (["verify", "--suite", "smok"], "smoke"),
        (["profile", "--op", "merge_state"], "merge_states"),
        (["profile", "--rows", "D1.fix"], "D1.fixed"),
        (["build", "--op", "split_plane"], "split_plan"),
        (["build", "--kernel", "combine_sm90_bf61"], "combine_sm90_bf16"),
        (["build", "--kernel", "combine"], "combine_sm90_bf16"),
    ],
)
def test_a_misspelt_name_gets_the_nearest_one(arguments: list[str], near: str) -> None:
    result = CliRunner().invoke(commands, arguments)
    assert result.exit_code == 2
    assert f"did you mean {near}" in result.stderr


def test_a_boards_architecture_is_answered_as_the_familys() -> None:
    assert ARCH.convert("sm103", None, None) == "sm100"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["build", "--arch", "sm10"], "not supported: sm10; supported: sm90, sm100, sm120, sm103, sm121, all"),
        (["verify", "--arch", "sm89"], "not supported: sm89; supported: sm90, sm100, sm120, sm103, sm121, all"),
        (["profile", "--gpu", "A100"], "not supported: A100; supported: H200, H100, H800, B200, B300, RTX PRO 6000, RTX 5090, GB10, all"),
    ],
)
def test_other_hardware_is_not_supported_rather_than_misspelt(arguments: list[str], said: str) -> None:
    result = CliRunner().invoke(commands, arguments)
    assert result.exit_code == 2
    assert result.stderr.splitlines()[-1] == f"Error: Invalid value for '{arguments[1]}': {said}"


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


def test_an_interruption_is_exit_code_130() -> None:
    group = LazyGroup("group")

    @click.command()
    def wait() -> None:
        raise KeyboardInterrupt

    group.get_command = lambda ctx, cmd_name: wait  # type: ignore[method-assign]
    result = CliRunner().invoke(group, ["wait"])
    assert result.exit_code == 130
    assert result.output == "interrupted\n"


def run_module(module: str, *arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a module from another folder and with nothing installed: the tree on the path is enough."""
    command = [sys.executable, "-m", module, *arguments]
    return subprocess.run(command, cwd="/", env={"PYTHONPATH": str(ROOT)}, stderr=subprocess.PIPE, text=True, check=False, **options)


@pytest.mark.parametrize("module", ["cute_mla", "cute_mla.cli"])
def test_the_modules_and_the_console_script_are_one_program(module: str) -> None:
    script = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]["cute-mla"]
    assert script == "cute_mla.cli:main"
    result = run_module(module, "--version", stdout=subprocess.PIPE)
    assert (result.stdout, result.returncode) == (f"cute-mla, version {cute_mla.__version__}\n", 0)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_output_that_cannot_be_written_is_one_line() -> None:
    with Path("/dev/full").open("w") as full:
        result = run_module("cute_mla", "show", "support", stdout=full)
    assert (result.returncode, result.stderr) == (1, "Error: No space left on device\n")


def test_a_reader_that_leaves_is_no_traceback() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    result = run_module("cute_mla", "show", "support", stdout=writer)
    os.close(writer)
    assert (result.returncode, result.stderr) == (1, "")


@pytest.mark.parametrize("command", [["show", "support"], ["--help"], ["paint"]])
def test_a_closed_output_is_no_traceback(command: list[str]) -> None:
    script = f"exec {sys.executable} -m cute_mla {' '.join(command)} >&-"
    result = subprocess.run(["sh", "-c", script], cwd=ROOT, stderr=subprocess.PIPE, text=True, check=False)
    assert result.returncode == (2 if command == ["paint"] else 0)
    assert "Traceback" not in result.stderr


def test_a_full_disk_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object, **options: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(click.ClickException, match=r"cannot write .*records\.json: No space left on device"):
        write_file(tmp_path / "records.json", "[]")
    assert list(tmp_path.iterdir()) == []


def test_the_folders_at_the_top_are_imported_from_the_tree() -> None:
    script = (
        "import cute_mla.cli.build as a, cute_mla.aot_build.tools as b, cute_mla.profiles as c; print(a.__file__, b.__file__, c.__file__)"
    )
    result = subprocess.run(
        [sys.executable, "-c", script], cwd="/", env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=True
    )
    found = [Path(name).resolve() for name in result.stdout.split()]
    assert found == [ROOT / "cli" / "build.py", ROOT / "aot_build" / "tools.py", ROOT / "profiles" / "__init__.py"]
