"""The smallest kernel that uses what the real ones do: a tensor map, TMA, an mbarrier and shared memory.

CTA i copies rows row + 64 i .. + 63 of a [rows, 64] matrix: src [rows, 64] by tensor map, dst [64 * grid, 64] by pointer.
A fault plants what one of the gates must find.
"""

from dataclasses import dataclass

import cutlass
import cutlass.experimental.cuda as xcuda
from cutlass import BFloat16, Int32, Int64, cute
from cutlass.cute.runtime import make_ptr
from cutlass.experimental import primitives

from cute_mla.aot_build.variants import Variant
from cute_mla.kernels.definition import KernelDefinition
from cute_mla.manifest import Barrier, Role, kernel_name
from cute_mla.spec.arch import SM90, Arch
from tests.support.params import int32s, pointers, tensor_maps

TILE = 64
THREADS = 128
TILE_BYTES = TILE * TILE * 2
PARAMS = (*tensor_maps("src"), *pointers("dst"), *int32s("row"))


@dataclass(frozen=True)
class TmaCopyConfig:
    """fault: "" for a kernel that passes every gate, "stack" for one with thread-local memory, "name" for one not renamed."""

    fault: str = ""

    @property
    def name(self) -> str:
        """The kernel's name in the manifest, without op and arch."""
        return f"bf16_{self.fault}" if self.fault else "bf16"


@cute.struct
class Smem:
    """One tile and the barrier that its arrival completes."""

    loaded: cute.struct.MemRange[Int64, 1]
    tile: cute.struct.Align[cute.struct.MemRange[BFloat16, TILE * TILE], 1024]


@cute.kernel
def tma_copy(src: cutlass.GridConstant[xcuda.TensorMap], dst: cute.Pointer, row: Int32, fault: cutlass.Constexpr) -> None:
    smem = cutlass.memory.SmemAllocator().allocate(Smem)
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    loaded = smem.loaded.data_ptr()
    tile = smem.tile.get_tensor(cute.make_layout(TILE * TILE))
    if thread == 0:
        cute.arch.mbarrier_init(loaded, 1)
        cute.arch.mbarrier_init_fence()
    cute.arch.sync_threads()
    if thread == 0:
        cute.arch.mbarrier_arrive_and_expect_tx(loaded, TILE_BYTES)
        primitives.cp_async_bulk_tensor_shared_cta_global(tile.iterator.raw_ptr(), src.get_ptr(), (0, row + block * TILE), loaded.raw_ptr())
    cute.arch.mbarrier_wait(loaded, 0)
    out = cute.make_tensor(dst + block * TILE * TILE, cute.make_layout(TILE * TILE))
    if cutlass.const_expr(fault == "stack"):
        local = cute.make_rmem_tensor(cute.make_layout(256), BFloat16)
        for i in cutlass.range(256, unroll=1):
            local[i] = tile[(i * row) % (TILE * TILE)]
        out[thread] = local[row % 256]
    else:
        for i in cutlass.range_constexpr(TILE * TILE // THREADS):
            out[thread + i * THREADS] = tile[thread + i * THREADS]


@cute.jit
def launch(src: cute.Pointer, dst: cute.Pointer, row: Int32, name: cutlass.Constexpr, fault: cutlass.Constexpr) -> None:
    if cutlass.const_expr(fault != "name"):
        tma_copy.set_name_prefix(name, remove_cutlass_symbol=True, keep_mangled_name=False)
    # Only the descriptor's type matters here: the host function is never run.
    described = xcuda.create_tensor_map_tiled(
        global_address=src.toint(), dtype=BFloat16, global_dims=[TILE, TILE], global_strides=[8], box_dims=[TILE, TILE]
    )
    tma_copy(described, dst, row, fault).launch(grid=(1, 1, 1), block=(THREADS, 1, 1), smem=Smem.size_in_bytes())  # type: ignore[attr-defined]


def build(config: TmaCopyConfig, arch: Arch) -> KernelDefinition:
    """Return the kernel's source, ready to compile."""
    matrix = make_ptr(BFloat16, 0, cute.AddressSpace.gmem, assumed_align=16)
    return KernelDefinition(
        op="tma_copy",
        config=config,
        host=launch,
        args=(matrix, matrix, Int32(0), kernel_name("tma_copy", arch.name, config.name), config.fault),
        params=PARAMS,
        block=(THREADS, 1, 1),
        cluster=(1, 1, 1),
        smem_bytes=Smem.size_in_bytes(),  # type: ignore[attr-defined]
        barriers=(Barrier("loaded", 0, 1),),
        roles=(Role("copy", 0, THREADS // 32),),
        expected={"UTMALDG": 1, "mbarrier.init": 1},
    )


GOOD = Variant("tma_copy", SM90, TmaCopyConfig(), __name__)
SPILLING = Variant("tma_copy", SM90, TmaCopyConfig("stack"), __name__)
NOT_RENAMED = Variant("tma_copy", SM90, TmaCopyConfig("name"), __name__)
