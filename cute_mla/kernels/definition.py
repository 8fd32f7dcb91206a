"""Definition that a kernel file hands to the build: the host function to compile, and all that the manifest records of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from ..manifest import Barrier, NamedBarrier, Role
from ..spec.abi import Param


class KernelConfig(Protocol):
    """A variant's fields: any frozen dataclass with a name."""

    @property
    def name(self) -> str:
        """Return the kernel's name in the manifest, without op and arch."""


@dataclass(frozen=True)
class KernelDefinition:
    """One variant, ready to compile.

    host: a cute.jit function that launches one kernel; args: example arguments for cute.compile, which fix its types.
    params: what the launched kernel takes, in order.
    block, cluster: threads and CTAs along x, y, z. smem_bytes: dynamic shared memory of one CTA.
    tmem_columns: of tensor memory that one CTA allocates.
    expected: instruction counts derived from the tile shapes, by SASS mnemonic (such as HGMMA or UTMALDG) or PTX opcode
        (such as wgmma.mma_async); a build in which the compiler emitted another number of them fails.
    overlapped: instructions, by SASS mnemonic, of which at least so many must stand behind a WGMMA and before the next wait for
        all of them: what the kernel means to do meanwhile.
    """

    op: str
    config: KernelConfig
    host: Callable[..., Any]
    args: tuple[Any, ...]
    params: tuple[Param, ...]
    block: tuple[int, int, int]
    cluster: tuple[int, int, int]
    smem_bytes: int
    barriers: tuple[Barrier, ...] = ()
    named_barriers: tuple[NamedBarrier, ...] = ()
    roles: tuple[Role, ...] = ()
    expected: dict[str, int] = field(default_factory=dict)
    tmem_columns: int = 0
    overlapped: dict[str, int] = field(default_factory=dict)
