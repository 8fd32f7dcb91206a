"""Peers of `profile --device clock`: another library's cubin with descriptions of its launches."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from cute_mla.simulator.engine.launch_file import LaunchFile


def read_peer(cubin: Path | None, descriptions: Sequence[Path]) -> tuple[list[LaunchFile], bytes]:
    """Return the launches and the cubin of a peer, empty without one. UsageError for a file that cannot be read or used."""
    from cute_mla.simulator.engine.launch_file import LaunchFileError, read_launch_file

    if cubin is None:
        return [], b""
    try:
        return [read_launch_file(path) for path in descriptions], cubin.read_bytes()
    except LaunchFileError as error:
        raise click.UsageError(f"--peer-launch: {error}") from error
    except OSError as error:
        raise click.UsageError(f"--peer-cubin: cannot read {cubin}: {error.strerror}") from error


def time_peer_on(gpu: str, cubin: bytes, launches: Sequence[LaunchFile]) -> dict[str, Any]:
    """Return the figures of a peer on a GPU. ClickException, which is exit code 1, if it cannot be timed."""
    from cute_mla.profiles.clock.constants import constants
    from cute_mla.profiles.clock.peer import time_peer
    from cute_mla.simulator.engine.launch_file import LaunchFileError

    click.echo(f"predicting {launches[-1].name} on {gpu}", err=True)
    try:
        return time_peer(cubin, launches, constants(gpu))
    except LaunchFileError as error:
        raise click.ClickException(str(error)) from error
