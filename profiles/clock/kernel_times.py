"""Times of a kernel from runs of one cluster: clocks of a block of keys, of the fixed part, and between two pieces of work."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod

from cute_mla.manifest import KernelEntry
from cute_mla.testing.operations import operation
from cute_mla.testing.operations.dense_decode.case import DenseDecodeCase
from cute_mla.testing.operations.sparse_decode.case import SparseDecodeCase

from ..kernel_stats.dynamic_counts import case_of, keys_of_block
from .cluster_run import ClusterRun, clock_call, cluster_run
from .constants import Constants
from .engine import Setting
from .kernel import KernelClock

SHORT, LONG = 6, 12  # blocks of keys of the two runs: even, and more than the stages of any pipeline
_PIECES = 2
_COLD_OPS = ("dense_decode", "sparse_decode")

Shares = Mapping[str, float]

_runs: dict[tuple[str, Constants, Setting, int, int], ClusterRun] = {}  # by kernel, circumstances, blocks and pieces


@dataclass(frozen=True)
class KernelTimes:
    """Clocks of one cluster. block: each further block of keys. fixed: all that does not depend on the number of blocks.

    use: share of the clocks of a block in which each unit is busy. waits: by role and cause, the share in which a warp that works waits.
    """

    block: float
    fixed: float
    use: Shares
    waits: Mapping[str, Shares]


def is_cold(entry: KernelEntry) -> bool:
    """Return whether the keys of a kernel are read once, from HBM."""
    return entry.op in _COLD_OPS or (entry.op == "mqa_logits" and bool(entry.config["paged"]))


def kernel_times(entry: KernelEntry, constants: Constants, setting: Setting) -> KernelTimes:
    """Run a kernel over SHORT and over LONG blocks. ValueError for a kernel without a loop over keys."""
    few, many = (_run(entry, constants, setting, blocks) for blocks in (SHORT, LONG))
    return times_between(entry, few, many)


def times_between(entry: KernelEntry, few: ClusterRun, many: ClusterRun) -> KernelTimes:
    """Return the times by the difference of a run over SHORT and a run over LONG blocks."""
    number = LONG - SHORT
    block = (many.end - few.end) / number
    use = {unit: (many.busy[unit] - few.busy[unit]) / number / block for unit in many.busy}
    waits: dict[str, Shares] = {}
    for role in entry.roles:
        every = range(role.first_warp, role.first_warp + role.warps)
        warps = [warp for warp in every if many.issued.get(warp, 0) > few.issued.get(warp, 0)]  # the others have nothing to do
        causes = {cause for warp, cause in many.waits if warp in warps}
        of_role = {
            cause: sum(many.waits.get((warp, cause), 0) - few.waits.get((warp, cause), 0) for warp in warps) / number / len(warps) / block
            for cause in sorted(causes)
        }
        waits[role.name] = {cause: share for cause, share in of_role.items() if share > 0}
    return KernelTimes(block, many.end - LONG * block, use, waits)


def seam_clocks(entry: KernelEntry, constants: Constants, setting: Setting, times: KernelTimes) -> float:
    """Return the clocks that a further piece of work adds beside its blocks."""
    run = _run(entry, constants, setting, SHORT, _PIECES)
    return (run.end - times.fixed - _PIECES * SHORT * times.block) / (_PIECES - 1)


def _run(entry: KernelEntry, constants: Constants, setting: Setting, blocks: int, pieces: int = 1) -> ClusterRun:
    key = entry.cubin_sha256, constants, setting, blocks, pieces
    if key not in _runs:
        _runs[key] = cluster_run(clock_kernel(entry, constants, setting, blocks, pieces))
    return _runs[key]


def clock_kernel(entry: KernelEntry, constants: Constants, setting: Setting, blocks: int, pieces: int = 1) -> KernelClock:
    """Time one cluster of a kernel over so many blocks of keys in each of some pieces. ValueError for a kernel without a loop over keys."""
    make = case_of(entry)
    if make is None:
        raise ValueError(f"{entry.name} has no loop over keys")
    case = make(blocks * keys_of_block(entry), pieces)
    if setting.rows:
        assert isinstance(case, DenseDecodeCase | SparseDecodeCase), "rows of a decode"
        case = replace(case, h_q=setting.rows, sm_count=prod(entry.cluster))
    tensors = operation(case).make_tensors(case, "cpu")
    assert case.sm_count is not None
    return clock_call(entry, case.sm_count, constants, setting, lambda: operation(case).call(case, tensors, None))
