"""Sparse MLA prefill on Blackwell for up to 64 heads: a CTA works alone on each query token. sm100.py has the formulas.

A pair of CTAs multiplies 128 rows at a time, of which 64 heads fill half. Here a CTA multiplies 64 rows, gathers all columns of every key,
and walks every grid-th token, 64 indices (one tile) at a time.

The trick: S is split over the columns, as between the CTAs of a pair, but both halves lie in the lanes of one warp.
  S    A of 64 rows and D of 64 rows take 16 of each warp's 32 lanes (PTX ISA, layout F), at half of the tensor core's rate. Q of the
       columns 0..255 (and 0..31 of RoPE) and its scores have the lanes 0..15, the other half 16..31. So Q takes 144 columns of tensor
       memory, not 288, which would not fit beside O; and a thread loads the same rows of both halves and adds them in registers.
  P V  tcgen05.mma.ws: D of 64 rows takes all lanes (layout E) at the whole rate. Lanes 0..63 have the first 128 of 256 columns of O,
       lanes 64..127 the others.

Roles: as ../sm100/row_producer.py, mma in every CTA. Pipelines (producer -> consumer; arrivals per phase):
  left_ready[3]    gather -> mma           4: columns 0..255 of a tile's keys
  kv_ready[3]      gather -> mma           4: the other columns
  left_free[3]     mma -> gather           2: P V has read columns 0..255; the bits have been read
  kv_free[3]       mma -> gather, output   1: P V has read the others, and P
  seen_ready[3]    gather -> score, output, and by way of left_ready mma   4: a bit per key of the stage
  query_ready      output -> mma           4: Q of a token is in tensor memory, once the last S of the token before is there
  scores_ready     mma -> score, output    1: S of a tile
  scores_free      score -> mma            4
  alpha_ready[2]   score -> output         4: rescale factors
  probs_ready[2]   score -> mma            4: P, over the RoPE columns of its tile
  output_ready[2]  output -> mma           4: O is scaled; of a token's first tile, O of the token before has been read
  stats_ready, stats_free   score -> output, and back   4: what the softmax of a token has come to

Order of products: S of tile n + 1, then P V of tile n. A tile of which no index names a row is passed on, as in sm100.py.
"""

from __future__ import annotations

from cutlass import cute

from ...spec.arch import Arch
from ...spec.mla import D_LATENT
from ...spec.sparse_prefill import SparsePrefillConfig
from ..attention.kernel import AttentionKernel
from ..definition import KernelDefinition
from ..primitives import tcgen05
from ..sm100.config import TMEM_COLUMNS
from ..sm100.indexed_keys import SeenBits, SeenTiles
from ..sm100.output import OutputRole
from ..sm100.row_producer import MMA_WARP, OUTPUT_WARP, PRODUCER_WARP, THREADS, role_table
from ..sm100.score import QueryLoader
from .abi import Sm100Abi
from .operands import Operands
from .sm100_heads64_gather import HalvesProducer, TokenEntries
from .sm100_heads64_mma import HeadsGemm, HeadsMmaRole
from .sm100_heads64_score import FragmentMask, FragmentRows, HeadsScoreRole
from .sm100_heads64_tiles import HALVES, HEADS64, HeadsPipes, HeadsTiles, smem_layout
from .sm100_output import TokenOutputRole, TokenQueries

SCORE_REGISTERS, OUTPUT_REGISTERS, PRODUCER_REGISTERS, MMA_REGISTERS = 128, 240, 96, 48
assert SCORE_REGISTERS + OUTPUT_REGISTERS + PRODUCER_REGISTERS + MMA_REGISTERS <= 512, "of a lane in four warps"


class SparsePrefillHeads64(AttentionKernel):
    """One variant of the kernel."""

    threads = THREADS

    def __init__(self, config: SparsePrefillConfig, arch: Arch) -> None:
        super().__init__(Sm100Abi(config), arch)
        self.has_rope = config.d_qk > D_LATENT
        self.smem = smem_layout()

    @cute.jit
    def run(self, operands: Operands):
        """Allocate, initialise the barriers, and give each role its warps."""
        memory = self.smem.allocate()
        tiles, pipes = HeadsTiles.create(HEADS64, memory), HeadsPipes.create(memory)
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == PRODUCER_WARP:
            with cute.arch.elect_one():
                pipes.initialise_all()
        if warp == MMA_WARP:
            tcgen05.allocate(tiles.tmem_cell, TMEM_COLUMNS, tcgen05.OWN_GROUP)
        cute.arch.sync_threads()
        tmem = tiles.tmem_cell.load()
        # the lengths and all tensors may come from the kernel before
        cute.arch.griddepcontrol_wait()
        if warp < OUTPUT_WARP:
            score = HeadsScoreRole(HEADS64, self.dtype, FragmentMask(), None, None, FragmentRows.create, SeenTiles())
            score.run(operands, tiles, pipes, tmem)
        elif warp < PRODUCER_WARP:
            cute.arch.setmaxregister_increase(OUTPUT_REGISTERS)
            queries = TokenQueries(QueryLoader(HEADS64, self.has_rope))
            output = OutputRole(HEADS64, self.dtype, scaled_at_once=32)
            TokenOutputRole(output, self.dtype, queries, SeenTiles()).run(operands, tiles, pipes, tmem)
        elif warp < MMA_WARP:
            cute.arch.setmaxregister_decrease(PRODUCER_REGISTERS)
            HalvesProducer(self.has_rope, TokenEntries(), SeenBits()).run(operands, tiles, pipes, warp - PRODUCER_WARP)
        else:
            cute.arch.setmaxregister_decrease(MMA_REGISTERS)
            if warp == MMA_WARP:
                gemm = HeadsGemm(self.dtype, self.has_rope, tiles, tmem)  # type: ignore[arg-type]  # of HeadsTiles.create
                HeadsMmaRole(HEADS64, validity=SeenTiles()).run(operands.schedule, pipes, gemm)
        tcgen05.fence_before_signal()
        cute.arch.sync_threads()
        if warp == MMA_WARP:
            tcgen05.fence_after_wait()
            tcgen05.free(tmem, TMEM_COLUMNS, tcgen05.OWN_GROUP)


def build(config: SparsePrefillConfig, arch: Arch) -> KernelDefinition:
    """Return the variant, ready to compile."""
    kernel = SparsePrefillHeads64(config, arch)
    steps = HEADS64.latent_steps + (HEADS64.rope_steps if kernel.has_rope else 0)
    return kernel.definition(
        smem_bytes=kernel.smem.nbytes,
        barriers=kernel.smem.barriers(),
        named_barriers=(),
        roles=role_table("gather"),
        expected={"UTCHMMA": HALVES * (steps + HEADS64.key_steps)},
        tmem_columns=TMEM_COLUMNS,
    )
