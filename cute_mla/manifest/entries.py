"""Entries of the manifest: what runtime and simulator need to know of a kernel."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from ..spec.abi import Param


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
    """A role of warps first_warp .. first_warp + warps - 1 of a CTA."""

    name: str
    first_warp: int
    warps: int


@dataclass(frozen=True)
class KernelEntry:
    """Manifest entry of one kernel, for the runtime and the simulator.

    name: "<op>_<arch>_<config name>", the key of the manifest and the stem of both files.
    cubin, ptx: file names beside the manifest; *_sha256: hex digests of their bytes.
    block, cluster: threads and CTAs along x, y, z. smem_bytes: dynamic shared memory of one CTA.
    tmem_columns: columns of tensor memory that one CTA allocates, 0 without tensor memory.
    stack_bytes: per-thread local memory, 0 in everything that ships.
    config: the variant's fields, for display. instructions: counts of selected SASS mnemonics, for display and gates.
    fingerprint: sha256 over sources, tool versions and options; an equal one means that the kernel is up to date.
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
    tmem_columns: int = 0
    barriers: tuple[Barrier, ...] = ()
    named_barriers: tuple[NamedBarrier, ...] = ()
    roles: tuple[Role, ...] = ()
    instructions: dict[str, int] = field(default_factory=dict)
    tools: dict[str, str] = field(default_factory=dict)

    @property
    def matrix_products(self) -> int:
        """Tensor-core instructions of the cubin."""
        return sum(number for mnemonic, number in self.instructions.items() if re.fullmatch(r"[HQI]G?MMA|UTC[HQIO]MMA", mnemonic))


def kernel_name(op: str, arch: str, config_name: str) -> str:
    """Return the manifest key of a variant."""
    return f"{op}_{arch}_{config_name}"
