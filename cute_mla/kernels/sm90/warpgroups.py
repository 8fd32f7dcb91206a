"""The four warpgroups of the SM90 kernels over a latent: their names, registers, named barriers and common start."""

from __future__ import annotations

from cutlass import Int32, Uint32, cute

from ...manifest import NamedBarrier, Role

WARPGROUP = 128
WARPS_PER_GROUP = WARPGROUP // 32
THREADS = 4 * WARPGROUP
OUTPUT_GROUPS = 2
LAUNCH_REGISTERS = 128  # a lane, of 512 threads

SCORE_BARRIER = 1  # bar.sync ids; 0 is the CTA's
OUTPUT_BARRIER = 2  # and 3


def group_of(warp: Int32) -> Int32:
    """Return the warpgroup of a warp."""
    return Int32(Uint32(warp) // WARPS_PER_GROUP)


def set_registers(count: int) -> None:
    """Set the registers of each lane of this warpgroup. A whole warpgroup."""
    if count < LAUNCH_REGISTERS:
        cute.arch.setmaxregister_decrease(count)
    else:
        cute.arch.setmaxregister_increase(count)


def sync_start(cluster: int) -> None:
    """Wait until the barriers are initialised in every CTA that shares them. Their fence has released them, so the arrival need not."""
    if cluster > 1:
        cute.arch.cluster_arrive_relaxed()
        cute.arch.cluster_wait()
    else:
        cute.arch.sync_threads()


def named_barriers() -> tuple[NamedBarrier, ...]:
    """Return the named barriers of score and output."""
    return (
        NamedBarrier("score", SCORE_BARRIER),
        NamedBarrier("output_left", OUTPUT_BARRIER),
        NamedBarrier("output_right", OUTPUT_BARRIER + 1),
    )


def role_table(producer: str) -> tuple[Role, ...]:
    """Return the four warpgroups. producer: name of the role that brings the keys."""
    names = (producer, "score", "output_left", "output_right")
    return tuple(Role(name, group * WARPS_PER_GROUP, WARPS_PER_GROUP) for group, name in enumerate(names))
