"""mbarrier idioms: rings of slots with phases, arrivals by one lane of a warp."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
from cutlass import Int32, Int64, Uint32, cute

from ...manifest import Barrier


@dataclass(frozen=True)
class Place:
    """A use of a ring, carried from one use to the next so that nothing is divided. parity: the one that completes with the use."""

    slot: Int32
    parity: Int32

    def following(self, slots: int) -> Place:
        """Of the next use of a ring of so many slots."""
        slot = self.slot + 1
        again = slot == slots
        return Place(cutlass.select_(again, Int32(0), slot), cutlass.select_(again, self.parity ^ 1, self.parity))


@dataclass(frozen=True)
class Ring:
    """A ring of `slots` barriers in shared memory. Use number n of the ring is slot n % slots in phase (n / slots) % 2. Uses
    are counted from 0, and divided as unsigned numbers, which takes half of the instructions."""

    base: cute.Pointer
    slots: int

    def slot(self, use: Int32) -> Int32:
        """The slot of a use."""
        return Int32(Uint32(use) % self.slots)

    def barrier(self, use: Int32) -> cute.Pointer:
        """The barrier of a use."""
        return self.base + self.slot(use)

    def parity(self, use: Int32) -> Int32:
        """The parity that completes with a use."""
        return Int32(Uint32(use) // self.slots) & 1

    def place(self, use: Int32) -> Place:
        """Of a use."""
        return Place(self.slot(use), self.parity(use))

    def after(self, place: Place) -> Place:
        """The place behind one."""
        return place.following(self.slots)

    def ahead(self, place: Place, count: int) -> Place:
        """The place so many uses behind one, fewer than there are slots."""
        slot = place.slot + count
        again = slot >= self.slots
        return Place(cutlass.select_(again, slot - self.slots, slot), cutlass.select_(again, place.parity ^ 1, place.parity))

    def further(self, place: Place, number: int) -> Place:
        """The place behind that of use `number` of a turn that began at an even use. In a ring of evenly many slots two of them lie
        side by side in one phase."""
        if number % 2 == 0 and self.slots % 2 == 0:
            return Place(place.slot + 1, place.parity)
        return self.ahead(place, 1)

    def at(self, place: Place) -> cute.Pointer:
        """The barrier at a place."""
        return self.base + place.slot

    def wait_ready_at(self, place: Place) -> None:
        """wait_ready of the use at a place."""
        cute.arch.mbarrier_wait(self.at(place), place.parity)

    def await_free_at(self, place: Place) -> None:
        """wait_free of the use at a place."""
        cute.arch.mbarrier_wait(self.base + place.slot, place.parity ^ 1)

    def initialise(self, arrivals: int | Int32) -> None:
        """Sets the arrivals that complete a phase. One thread, before any use."""
        for slot in range(self.slots):
            cute.arch.mbarrier_init(self.base + slot, arrivals)

    def wait_ready(self, use: Int32) -> None:
        """Blocks until the producer of this use has arrived."""
        cute.arch.mbarrier_wait(self.barrier(use), self.parity(use))

    def wait_free(self, use: Int32) -> None:
        """Blocks until the consumers of the slot's previous use have arrived; the first use of a slot is free."""
        cute.arch.mbarrier_wait(self.barrier(use), self.parity(use) ^ 1)


def barrier_table(offset: int, rings: tuple[tuple[str, int], ...]) -> tuple[Barrier, ...]:
    """What the manifest records of rings (name, slots) that lie one behind the other from a byte of shared memory on."""
    barriers = []
    for name, slots in rings:
        barriers.append(Barrier(name, offset, slots))
        offset += 8 * slots
    return tuple(barriers)


def barrier_at(address: Int32) -> cute.Pointer:
    """The mbarrier at an address in shared memory."""
    return cute.make_ptr(Int64, address, cute.AddressSpace.smem, assumed_align=8)


def arrive(barrier: cute.Pointer) -> None:
    """One arrival per warp, after all its lanes are done."""
    cute.arch.sync_warp()
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive(barrier)


def arrive_at(barrier: cute.Pointer, rank: int) -> None:
    """One arrival per warp on the same barrier of one CTA of the cluster, after all its lanes are done.

    What it hands over lies in this CTA and is read by this SM's tensor core, or not at all by the peer's threads, so the
    release is of CTA scope: one of cluster scope costs a MEMBAR.GPU each. NVIDIA's two-CTA kernels do the same."""
    cute.arch.sync_warp()
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive(barrier, rank)


@cute.jit
def arrive_cluster(barrier: cute.Pointer, ranks: cutlass.Constexpr[int]):
    """One arrival per warp on the same barrier of every CTA of the cluster, each by another lane: what the warp was reading may be
    overwritten.

    Nothing is handed to the peer but that, so the release is of CTA scope: one of cluster scope costs a MEMBAR.GPU each."""
    if cutlass.const_expr(ranks == 1):
        arrive(barrier)
    else:
        cute.arch.sync_warp()
        lane = cute.arch.lane_idx()
        if lane < ranks:
            cute.arch.mbarrier_arrive(barrier, lane)
