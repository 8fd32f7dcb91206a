"""The record that ties build to runtime: one entry per shipped kernel. The only module that reads or writes it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from .spec.abi import Param, ParamKind

MANIFEST_NAME = "manifest.json"
FORMAT_VERSION = 1


class ManifestError(ValueError):
    """The manifest is missing, damaged or of another format version."""


@dataclass(frozen=True)
class Barrier:
    """A named group of mbarriers in shared memory: `count` of 8 bytes each, from `offset`."""

    name: str
    offset: int
    count: int


@dataclass(frozen=True)
class NamedBarrier:
    """A hardware barrier (bar.sync id) with its meaning."""

    name: str
    barrier_id: int


@dataclass(frozen=True)
class Role:
    """Warps first_warp .. first_warp + warps - 1 of a CTA, and what they do."""

    name: str
    first_warp: int
    warps: int


@dataclass(frozen=True)
class KernelEntry:
    """All that the runtime and the simulator need to know of one kernel.

    name: "<op>_<arch>_<config name>", the key of the manifest and the stem of both files.
    cubin, ptx: file names beside the manifest; *_sha256: hex digests of their bytes.
    block, cluster: threads and CTAs along x, y, z. smem_bytes: dynamic shared memory of one CTA.
    stack_bytes: per-thread local memory, 0 in everything that ships.
    config: the variant's fields, for show. instructions: counts of the SASS mnemonics that matter, for show and gates.
    fingerprint: sha256 over sources, tool versions and options: equal means up to date.
    """

    name: str
    op: str
    arch: str
    config: dict[str, Any]
    entry: str
    cubin: str
    cubin_sha256: str
    ptx: str
    ptx_sha256: str
    params: tuple[Param, ...]
    block: tuple[int, int, int]
    cluster: tuple[int, int, int]
    smem_bytes: int
    registers: int
    stack_bytes: int
    fingerprint: str
    barriers: tuple[Barrier, ...] = ()
    named_barriers: tuple[NamedBarrier, ...] = ()
    roles: tuple[Role, ...] = ()
    instructions: dict[str, int] = field(default_factory=dict)
    tools: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Manifest:
    """The shipped kernels, by name."""

    kernels: dict[str, KernelEntry]


def kernel_name(op: str, arch: str, config_name: str) -> str:
    """The manifest key of a variant."""
    return f"{op}_{arch}_{config_name}"
