"""The SM90 kernels over a latent whose first warpgroup, all of it, brings the keys."""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Int32, cute

from .config import THREADS, WARPGROUP, Pipes, Tiles
from .roles import RolesSm90, group_of, set_registers


class GatheredRolesSm90(RolesSm90):
    """The four warpgroups. A kernel is a subclass that has `gather`."""

    threads = THREADS

    def gather(self, operands: Any, tiles: Tiles, pipes: Pipes, thread: Int32) -> None:
        """Brings the keys of every tile to its slots. Waits kv_free, rope_free. Signals kv_ready, rope_ready."""
        raise NotImplementedError

    @cute.jit
    def run(self, operands: Any):
        """The body of the kernel."""
        tiles, pipes = self.carve_smem(cutlass.memory.SmemAllocator())
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == 0:
            with cute.arch.elect_one():
                self.initialise(pipes)
        self.sync_start()
        # the plan, the lengths, the indices, Q and the cache may come from the kernel before
        cute.arch.griddepcontrol_wait()

        group = group_of(warp)
        thread = cute.arch.thread_idx()[0] % WARPGROUP
        if group == 0:
            set_registers(self.geometry.first_registers)
            self.gather(operands, tiles, pipes, thread)
        elif group == 1:
            set_registers(self.geometry.score_registers)
            self.score(operands, tiles, pipes, thread)
        else:
            set_registers(self.geometry.output_registers)
            self.output(operands, tiles, pipes, thread, group - 2)
