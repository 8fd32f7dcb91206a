"""Pipelines in shared memory: mbarriers by stage and phase, in the words of cutlass.pipeline.

A pipeline has one array of mbarriers per direction, such as kv_ready (producer -> consumer) and kv_free (back). A role uses a
stage either by the number of the use, from which stage and phase are divided out, or by a PipelineState that it carries along.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import cutlass
from cutlass import Boolean, Int32, Int64, Uint32, cute


@dataclass(frozen=True)
class PipelineState:
    """Pipeline stage and phase of one use, carried to avoid a division. phase: the parity that completes with the use."""

    stage: Int32
    phase: Int32

    def following(self, count: int, stages: int) -> list[PipelineState]:
        """Return this state and those after it, `count` together, in a pipeline of `stages` stages. count: at most `stages`."""
        states = []
        for i in range(count):
            stage = self.stage + i
            wraps = stage >= stages
            phase = cutlass.select_(wraps, self.phase ^ 1, self.phase)
            states.append(PipelineState(cutlass.select_(wraps, stage - stages, stage), phase))
        return states


Use: TypeAlias = Int32 | PipelineState  # number of a use, counted from 0, or its state


@dataclass(frozen=True)
class StageBarriers:
    """One mbarrier per stage, in shared memory.

    Use n has stage n % stages and phase (n / stages) % 2. Numbers are divided as unsigned ones, which takes half of the instructions.
    """

    base: cute.Pointer
    stages: int

    def stage(self, use: Int32) -> Int32:
        """Return the stage of a use."""
        return Int32(Uint32(use) % self.stages)

    def phase(self, use: Int32) -> Int32:
        """Return the parity that completes with a use."""
        return Int32(Uint32(use) // self.stages) & 1

    def state(self, use: Int32) -> PipelineState:
        """Return the stage and phase of a use."""
        return PipelineState(self.stage(use), self.phase(use))

    def advance(self, state: PipelineState) -> PipelineState:
        """Return the state of the next use."""
        stage = state.stage + 1
        wraps = stage == self.stages
        return PipelineState(cutlass.select_(wraps, Int32(0), stage), cutlass.select_(wraps, state.phase ^ 1, state.phase))

    def advance_by(self, state: PipelineState, count: int) -> PipelineState:
        """Return the state `count` uses later. count: at most the number of stages."""
        stage = state.stage + count
        wraps = stage >= self.stages
        return PipelineState(cutlass.select_(wraps, stage - self.stages, stage), cutlass.select_(wraps, state.phase ^ 1, state.phase))

    def advance_in_tile(self, state: PipelineState, number: int) -> PipelineState:
        """Return the state after that of use `number` of a tile, whose first use is even.

        With an even number of stages, an even use and the next one share a phase, so nothing wraps.
        """
        if number % 2 == 0 and self.stages % 2 == 0:
            return PipelineState(state.stage + 1, state.phase)
        return self.advance_by(state, 1)

    def barrier(self, use: Use) -> cute.Pointer:
        """Return the mbarrier of a use."""
        return self.base + (use.stage if isinstance(use, PipelineState) else self.stage(use))

    def initialise(self, arrivals: int | Int32) -> None:
        """Set the arrivals that complete a phase. One thread, before any use."""
        for stage in range(self.stages):
            cute.arch.mbarrier_init(self.base + stage, arrivals)

    def consumer_wait(self, use: Use) -> None:
        """Block until the producers of this use have committed it."""
        cute.arch.mbarrier_wait(self.barrier(use), self._phase(use))

    def producer_acquire(self, use: Use) -> None:
        """Block until the consumers of the stage's previous use have released it; the first use of a stage does not block."""
        cute.arch.mbarrier_wait(self.barrier(use), self._phase(use) ^ 1)

    def try_acquire(self, use: Use) -> Boolean:
        """Ask whether the stage is free. Work between this and `finish_acquire` hides what the answer takes."""
        return cute.arch.mbarrier_try_wait(self.barrier(use), self._phase(use) ^ 1)

    @cute.jit
    def finish_acquire(self, use: Use, free: Boolean):
        """Block as producer_acquire does, unless the stage was free already."""
        if not free:
            self.producer_acquire(use)

    def producer_commit(self, use: Use, cta: int | None = None) -> None:
        """Arrive once per warp, after all its lanes: what the warp has written may be read.

        cta: of a pair, the CTA whose barrier it is; None: this one's.
        """
        if cta is None:
            arrive(self.barrier(use))
        else:
            arrive_at(self.barrier(use), cta)

    def consumer_release(self, use: Use, cta: int | None = None) -> None:
        """Arrive once per warp, after all its lanes: what the warp has read may be overwritten. cta: as for producer_commit."""
        self.producer_commit(use, cta)

    def consumer_release_in_cluster(self, use: Use, ctas: int) -> None:
        """Release a stage in every CTA of the cluster, whose producers fill it together."""
        arrive_cluster(self.barrier(use), ctas)

    @cute.jit
    def drain(self, following: PipelineState):
        """Block until the consumers have released every stage: no signal may reach a CTA that is gone. following: the next use."""
        for i in cutlass.range(self.stages, unroll=1):
            wraps = following.stage + i >= self.stages
            stage = cutlass.select_(wraps, following.stage + i - self.stages, following.stage + i)
            cute.arch.mbarrier_wait(self.base + stage, cutlass.select_(wraps, following.phase, following.phase ^ 1))

    def _phase(self, use: Use) -> Int32:
        return use.phase if isinstance(use, PipelineState) else self.phase(use)


def barrier_at(address: Int32) -> cute.Pointer:
    """Return the mbarrier at a shared memory address."""
    return cute.make_ptr(Int64, address, cute.AddressSpace.smem, assumed_align=8)


def arrive(barrier: cute.Pointer) -> None:
    """Arrive once per warp, after all its lanes."""
    cute.arch.sync_warp()
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive(barrier)


def arrive_at(barrier: cute.Pointer, rank: int) -> None:
    """Arrive once per warp on the same barrier of one CTA of the cluster, after all lanes of the warp.

    The data handed over lies in this CTA and is read by this SM's tensor core, or not at all by the peer's threads. So the
    release has CTA scope: one of cluster scope costs a MEMBAR.GPU each. NVIDIA's two-CTA kernels do the same.
    """
    cute.arch.sync_warp()
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive(barrier, rank)


@cute.jit
def arrive_cluster(barrier: cute.Pointer, ranks: cutlass.Constexpr[int]):
    """Arrive once per warp on the same barrier of every CTA of the cluster, each by another lane.

    The arrival hands no data to the peer, so the release has CTA scope: one of cluster scope costs a MEMBAR.GPU each.
    """
    if cutlass.const_expr(ranks == 1):
        arrive(barrier)
    else:
        cute.arch.sync_warp()
        lane = cute.arch.lane_idx()
        if lane < ranks:
            cute.arch.mbarrier_arrive(barrier, lane)
