"""CuTe-DSL programs for the tests of their simulated device."""

import cutlass
import cutlass.experimental.cuda as xcuda
from cutlass import Float32, Int32, Int64, cute
from cutlass._mlir.dialects import llvm
from cutlass.experimental import primitives

THREADS = 64
TILE = 32  # rows and columns of a tile of fp32
TILE_BYTES = TILE * TILE * 4


@cute.kernel
def add_kernel(x: cute.Tensor, y: cute.Tensor, offset: Float32) -> None:
    """Write y = x + offset, an element a thread."""
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    y[block * THREADS + thread] = x[block * THREADS + thread] + offset


@cute.jit
def add(x: cute.Tensor, y: cute.Tensor, offset: Float32) -> None:
    """Launch add_kernel on as many CTAs as x needs."""
    add_kernel(x, y, offset).launch(grid=(cute.size(x) // THREADS, 1, 1), block=(THREADS, 1, 1))


@cute.jit
def add_twice(x: cute.Tensor, y: cute.Tensor, z: cute.Tensor) -> None:
    """Launch add_kernel two times, the second one as a dependent grid."""
    add_kernel(x, y, Float32(1)).launch(grid=(cute.size(x) // THREADS, 1, 1), block=(THREADS, 1, 1))
    add_kernel(y, z, Float32(1)).launch(grid=(cute.size(x) // THREADS, 1, 1), block=(THREADS, 1, 1), use_pdl=True)


@cute.jit
def add_pair(pair: tuple[cute.Tensor, cute.Tensor]) -> None:
    """Launch add_kernel on a pair of tensors."""
    add_kernel(pair[0], pair[1], Float32(1)).launch(grid=(cute.size(pair[0]) // THREADS, 1, 1), block=(THREADS, 1, 1))


@cute.jit
def add_cooperatively(x: cute.Tensor, y: cute.Tensor) -> None:
    """Launch add_kernel as a cooperative grid."""
    add_kernel(x, y, Float32(1)).launch(grid=(cute.size(x) // THREADS, 1, 1), block=(THREADS, 1, 1), cooperative=True)


@cute.jit
def add_pointers(x: cute.Pointer, y: cute.Pointer, n: Int32) -> None:
    """Launch add_kernel on the memory behind two pointers, as one cluster."""
    layout = cute.make_layout(n)
    add_kernel(cute.make_tensor(x, layout), cute.make_tensor(y, layout), Float32(2)).launch(
        grid=(n // THREADS, 1, 1), block=(THREADS, 1, 1), cluster=(3, 1, 1)
    )


@cute.kernel
def exchange_kernel(x: cute.Tensor, waits: cutlass.Constexpr[bool]) -> None:
    """Exchange the elements of two warps through shared memory."""
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    shared = cutlass.memory.SmemAllocator().allocate_tensor(Float32, cute.make_layout(THREADS), byte_alignment=16)
    shared[thread] = x[block * THREADS + thread]
    if cutlass.const_expr(waits):
        cute.arch.sync_threads()
    x[block * THREADS + thread] = shared[thread ^ 32]


class Exchange:
    """A program as a class, as CUTLASS's are. waits: whether the warps wait for each other."""

    def __init__(self, waits: bool) -> None:
        self.waits = waits

    @cute.jit
    def __call__(self, x: cute.Tensor) -> None:
        exchange_kernel(x, self.waits).launch(grid=(cute.size(x) // THREADS, 1, 1), block=(THREADS, 1, 1), smem=THREADS * 4)


@cute.struct
class Smem:
    """One tile and the barrier that its arrival completes."""

    loaded: cute.struct.MemRange[Int64, 1]
    tile: cute.struct.Align[cute.struct.MemRange[Float32, TILE * TILE], 1024]


@cute.kernel
def tile_kernel(x: cutlass.GridConstant[xcuda.TensorMap], y: cute.Tensor, waits: cutlass.Constexpr[bool]) -> None:
    """Copy a tile a CTA by TMA to shared memory, and from there to y."""
    smem = cutlass.memory.SmemAllocator().allocate(Smem)
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    loaded = smem.loaded.data_ptr()
    tile = smem.tile.get_tensor(cute.make_layout((TILE, TILE), stride=(TILE, 1)))
    if thread == 0:
        cute.arch.mbarrier_init(loaded, 1)
        cute.arch.mbarrier_init_fence()
    cute.arch.sync_threads()
    if thread == 0:
        cute.arch.mbarrier_arrive_and_expect_tx(loaded, TILE_BYTES)
        primitives.cp_async_bulk_tensor_shared_cta_global(tile.iterator.raw_ptr(), x.get_ptr(), (0, block * TILE), loaded.raw_ptr())
    if cutlass.const_expr(waits):
        cute.arch.mbarrier_wait(loaded, 0)
    for row in cutlass.range_constexpr(TILE // (THREADS // TILE)):
        i = row * (THREADS // TILE) + thread // TILE
        y[block * TILE + i, thread % TILE] = tile[i, thread % TILE]


class TileCopy:
    """A program whose tensor map the driver encodes. waits: whether the kernel waits for the copy."""

    def __init__(self, waits: bool = True) -> None:
        self.waits = waits

    @cute.jit
    def __call__(self, x: cute.Tensor, y: cute.Tensor) -> None:
        described = xcuda.create_tensor_map_tiled(
            global_address=x.iterator.toint(),
            dtype=Float32,
            global_dims=[TILE, x.shape[0]],
            global_strides=[TILE * 4 // 16],
            box_dims=[TILE, TILE],
        )
        grid = (x.shape[0] // TILE, 1, 1)
        tile_kernel(described, y, self.waits).launch(grid=grid, block=(THREADS, 1, 1), smem=Smem.size_in_bytes())  # type: ignore[attr-defined]


@cute.kernel
def unknown_kernel() -> None:
    """Execute an instruction that the simulator does not know."""
    llvm.inline_asm(None, [], "brkpt;", "", has_side_effects=True, asm_dialect=llvm.AsmDialect.AD_ATT)


@cute.jit
def unknown() -> None:
    """Launch unknown_kernel."""
    unknown_kernel().launch(grid=(1, 1, 1), block=(32, 1, 1))
