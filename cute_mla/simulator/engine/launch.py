"""Launch of a kernel: shape, arguments, and the names that make findings readable."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..codegen.module import Entry, Module
from ..numerics.tensor_map import TensorMap
from ..state.names import Names

Dim3 = tuple[int, int, int]


@dataclass(frozen=True)
class Launch:
    """One kernel launch.

    args: one item per PTX parameter, in PTX order: its little-endian bytes, or a tensor map for a 128-byte parameter.
    smem_bytes: dynamic shared memory of one CTA. grid counts CTAs and is a multiple of cluster. dependent: it may begin before the grid
    ahead of it has ended (programmatic dependent launch), and may access global memory only behind griddepcontrol.wait.
    Raises ValueError when arguments, block, cluster or shared memory do not fit the entry.
    """

    module: Module
    entry: str
    grid: Dim3
    block: Dim3
    cluster: Dim3
    smem_bytes: int
    args: tuple[bytes | TensorMap, ...] | list[bytes | TensorMap]
    names: Names = field(default_factory=Names)
    dependent: bool = False

    def __post_init__(self) -> None:
        if self.entry not in self.module.entries:
            raise ValueError(f"entry {self.entry!r}: the module has {', '.join(self.module.entries)}")
        for what, dims in (("grid", self.grid), ("block", self.block), ("cluster", self.cluster)):
            if len(dims) != 3 or any(extent < 1 for extent in dims):
                raise ValueError(f"{what} {dims}: needs three extents of at least 1")
        if any(extent % part for extent, part in zip(self.grid, self.cluster, strict=True)):
            raise ValueError(f"grid {self.grid} is not a multiple of the cluster {self.cluster}")
        required = self.target.reqntid
        if required is not None and tuple(self.block) != required:
            raise ValueError(f"block {self.block}: the entry requires {required}")
        if not 0 <= self.smem_bytes <= 1 << 20:
            raise ValueError(f"smem_bytes {self.smem_bytes}: must be 0 to 1 MiB")
        self._check_args()

    def _check_args(self) -> None:
        params = self.target.params
        if len(self.args) != len(params):
            raise ValueError(f"{len(self.args)} arguments given, {self.entry} takes {len(params)}")
        for param, arg in zip(params, self.args, strict=True):
            size = 128 if isinstance(arg, TensorMap) else len(arg)
            if size != param.size:
                raise ValueError(f"argument for {param.name}: {size} bytes given, {param.size} expected")

    @property
    def target(self) -> Entry:
        """Return the entry that is launched."""
        return self.module.entries[self.entry]

    @property
    def threads(self) -> int:
        """Return the number of threads of one CTA."""
        return self.block[0] * self.block[1] * self.block[2]
