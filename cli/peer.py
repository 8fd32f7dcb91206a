"""Peers of `profile --device clock`: another library's cubin with descriptions of its launches."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from cute_mla.profiles.clock.peer_launch import PeerLaunch


def read_peer(cubin: Path | None, descriptions: Sequence[Path]) -> tuple[list[PeerLaunch], bytes]:
    """Return the launches and the cubin of a peer, empty without one. UsageError for a file that cannot be read or used."""
    from cute_mla.profiles.clock.peer_launch import PeerError, read_peer_launch

    if cubin is None:
        return [], b""
    try:
        return [read_peer_launch(path) for path in descriptions], cubin.read_bytes()
    except PeerError as error:
        raise click.UsageError(f"--peer-launch: {error}") from error
    except OSError as error:
        raise click.UsageError(f"--peer-cubin: cannot read {cubin}: {error.strerror}") from error


def time_peer_on(gpu: str, cubin: bytes, launches: Sequence[PeerLaunch]) -> dict[str, Any]:
    """Return the figures of a peer on a GPU. ClickException, which is exit code 1, if it cannot be timed."""
    from cute_mla.profiles.clock.constants import constants
    from cute_mla.profiles.clock.peer import time_peer
    from cute_mla.profiles.clock.peer_launch import PeerError

    click.echo(f"predicting {launches[-1].name} on {gpu}", err=True)
    try:
        return time_peer(cubin, launches, constants(gpu))
    except PeerError as error:
        raise click.ClickException(str(error)) from error
