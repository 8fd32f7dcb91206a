"""Sparse MLA prefill on Blackwell: each query token attends to its own rows of an unpaged 16-bit latent.

For every query token and head r, over the rows j that the token's indices name and that exist:

    s_rj = <q_r, k_j>     p = softmax(scale * s)     out_r = sum_j p_rj k_j[:512]     max_logits_r = max_j scale * s_rj

A pair of CTAs holds the heads of a token, 64 each, and walks every grid-th token, 64 indices (one tile) at a time. Each CTA
gathers its half of the columns of every key, by cp.async: a key is fetched once, as key and as value, for all heads. Roles
and pipelines: ../sm100/row_producer.py and dense_decode/sm100.py; what differs here:

  kv_free[5]       mma -> gather, output   1, and in the even CTA one more, when the bits have been read
  query_ready      output -> mma           8: Q of a token is in tensor memory, once the last S of the token before is there
  scores_ready[2]  mma -> score, output    1: the output role waits for a token's last S
  output_ready[2]  output -> mma           8: O is scaled; of a token's first tile, O of the token before has been read
  seen_ready[5]    gather -> score, output, and by way of kv_ready mma: a bit per key of the stage

A tile of which no index names a row is passed on by all roles: no copies, no products, no softmax, no rescale. Its barriers
complete as ever, so that use number n of every pipeline remains tile n.

Between two tokens: the first S of the next token is issued before the last P V of this one. Its Q has waited in registers of the output
role, and replaces this token's Q once the last S is there. In variants that load Q by words of fewer than 16 bytes, and where either
token has no tiles, Q is loaded later and S follows P V.
"""

from __future__ import annotations

from cutlass import Int32, cute

from ...spec.arch import Arch
from ...spec.mla import D_LATENT, ELEMENT_BYTES
from ...spec.sparse_prefill import SparsePrefillConfig
from ..attention.kernel import AttentionKernel
from ..definition import KernelDefinition
from ..sm100.config import EVEN_CTA, SIXTEEN_BIT_PARTS, TMEM_COLUMNS, Tiles
from ..sm100.indexed_keys import SeenBits, SeenMask, SeenTiles
from ..sm100.mma import MmaRole, PairGemm
from ..sm100.output import OutputRole
from ..sm100.pair import begin, end, initialise
from ..sm100.row_copy import latent_columns, rope_columns
from ..sm100.row_producer import (
    KV_ARRIVALS,
    MMA_WARP,
    OUTPUT_WARP,
    PRODUCER_WARP,
    THREADS,
    RowProducer,
    role_table,
)
from ..sm100.score import NAMED_BARRIERS, QueryLoader
from . import sm100_heads64
from .abi import Sm100Abi
from .operands import Operands
from .sm100_keys import SkippingTile, TokenRows
from .sm100_output import TokenOutputRole, TokenQueries
from .sm100_score import TokenPipes, TokenScoreRole

# more than the shared ones for output, which holds a row of Q
SCORE_REGISTERS, OUTPUT_REGISTERS, PRODUCER_REGISTERS, MMA_REGISTERS = 128, 240, 96, 48
assert SCORE_REGISTERS + OUTPUT_REGISTERS + PRODUCER_REGISTERS + MMA_REGISTERS <= 512, "of a lane in four warps"


class SparsePrefillSm100(AttentionKernel):
    """One variant of the kernel."""

    threads = THREADS

    def __init__(self, config: SparsePrefillConfig, arch: Arch) -> None:
        super().__init__(Sm100Abi(config), arch)
        self.has_rope = config.d_qk > D_LATENT
        self.smem = SIXTEEN_BIT_PARTS.smem(*TokenPipes.fields())

    @cute.jit
    def run(self, operands: Operands):
        """Allocate, initialise the barriers, and give each role its warps."""
        memory = self.smem.allocate()
        tiles, pipes = Tiles.create(SIXTEEN_BIT_PARTS, memory), TokenPipes.create(memory)
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == PRODUCER_WARP:
            with cute.arch.elect_one():
                pipes.initialise_bits()
                initialise(pipes, SIXTEEN_BIT_PARTS, KV_ARRIVALS, mma_releases=True)
        tmem = begin(tiles, warp, MMA_WARP)
        if warp < OUTPUT_WARP:
            score = TokenScoreRole(SIXTEEN_BIT_PARTS, self.dtype, SeenMask(waits=False), None, None, validity=SeenTiles())
            score.run(operands, tiles, pipes, tmem)
        elif warp < PRODUCER_WARP:
            cute.arch.setmaxregister_increase(OUTPUT_REGISTERS)
            queries = TokenQueries(QueryLoader(SIXTEEN_BIT_PARTS, self.has_rope))
            output = OutputRole(SIXTEEN_BIT_PARTS, self.dtype, scaled_at_once=32)
            TokenOutputRole(output, self.dtype, queries, SeenTiles()).run(operands, tiles, pipes, tmem)
        elif warp < MMA_WARP:
            cute.arch.setmaxregister_decrease(PRODUCER_REGISTERS)
            RowProducer(self.columns, TokenRows(), SeenBits(SIXTEEN_BIT_PARTS.score_parts)).run(
                operands, tiles, pipes, warp - PRODUCER_WARP
            )
        else:
            cute.arch.setmaxregister_decrease(MMA_REGISTERS)
            if warp == MMA_WARP and cute.arch.block_idx_in_cluster() == EVEN_CTA:
                gemm = PairGemm(self.dtype, self.has_rope, tiles, tmem)
                MmaRole(SIXTEEN_BIT_PARTS, SeenTiles()).run(operands.schedule, pipes, gemm)
        end(warp, MMA_WARP, tmem)

    def columns(self, rank: Int32) -> SkippingTile:
        """Return the mover of half of the latent columns, and of the RoPE columns behind them."""
        runs = (latent_columns(rank), rope_columns(D_LATENT * ELEMENT_BYTES, rank))
        return SkippingTile(runs if self.has_rope else runs[:1])


def build(config: SparsePrefillConfig, arch: Arch) -> KernelDefinition:
    """Return the variant, ready to compile."""
    if config.cluster == 1:
        return sm100_heads64.build(config, arch)
    kernel = SparsePrefillSm100(config, arch)
    return kernel.definition(
        smem_bytes=kernel.smem.nbytes,
        barriers=kernel.smem.barriers(),
        named_barriers=NAMED_BARRIERS,
        roles=role_table("gather"),
        expected={"UTCHMMA": SIXTEEN_BIT_PARTS.products_per_tile(kernel.has_rope)},
        tmem_columns=TMEM_COLUMNS,
    )
