"""Sparse MLA decode on Blackwell, over every cache format.

For every query token and head r, over the slots j that the token's indices name and that exist:

    s_rj = <q_r, k_j>     p = softmax(scale * s)     out_r = sum_j p_rj k_j[:512]

A pair of CTAs holds the heads of one query token (block_idx y), 64 each, and walks the work tiles of one partition, 64
indices (one tile) at a time. Each CTA gathers its half of the columns of every key, converts what is e4m3, and puts it where
the TMA of the dense kernel would. Roles and pipelines: ../sm100/row_producer.py and dense_decode/sm100.py.
"""

from __future__ import annotations

from functools import partial

from cutlass import Int32, cute

from ...spec.arch import Arch
from ...spec.mla import D_LATENT
from ...spec.sparse_decode import SparseDecodeConfig
from ..attention.kernel import AttentionKernel
from ..attention.softmax import SinkScale
from ..definition import KernelDefinition
from ..primitives.arithmetic import pin_address
from ..sm100.config import EVEN_CTA, SIXTEEN_BIT, TMEM_COLUMNS, Tiles
from ..sm100.indexed_keys import IndexedPipes, SeenBits, SeenMask
from ..sm100.mma import MmaRole, PairGemm
from ..sm100.output import OutputRole
from ..sm100.pair import begin, end, initialise
from ..sm100.row_producer import (
    KV_ARRIVALS,
    MMA_REGISTERS,
    MMA_WARP,
    OUTPUT_REGISTERS,
    OUTPUT_WARP,
    PRODUCER_REGISTERS,
    PRODUCER_WARP,
    SCORE_REGISTERS,
    THREADS,
    RowProducer,
    first_lane_key,
    role_table,
)
from ..sm100.score import NAMED_BARRIERS, QueryLoader, ScoreRole
from .abi import SparseDecodeAbi
from .operands import IndexList, Operands, look_up, slot_address
from .sm100_columns import columns_of_cta, scale_fields
from .sm100_gather import ScaledKeys
from .sm100_v41 import MixedKeys


class SparseDecodeSm100(AttentionKernel):
    """One variant of the kernel."""

    threads = THREADS

    def __init__(self, config: SparseDecodeConfig, arch: Arch) -> None:
        super().__init__(SparseDecodeAbi(config), arch)
        self.config = config
        self.format = config.format
        self.has_rope = config.format.d_qk > D_LATENT
        self.smem = SIXTEEN_BIT.smem(*IndexedPipes.fields(), *scale_fields(config))

    @cute.jit
    def run(self, operands: Operands):
        """Allocate, initialise the barriers, and give each role its warps."""
        memory = self.smem.allocate()
        tiles, pipes = Tiles.create(SIXTEEN_BIT, memory), IndexedPipes.create(memory)
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == PRODUCER_WARP:
            with cute.arch.elect_one():
                pipes.initialise_bits()
                initialise(pipes, SIXTEEN_BIT, KV_ARRIVALS)
        tmem = begin(tiles, warp, MMA_WARP)
        if warp < OUTPUT_WARP:
            cute.arch.setmaxregister_increase(SCORE_REGISTERS)
            queries = QueryLoader(SIXTEEN_BIT, self.has_rope)
            ScoreRole(SIXTEEN_BIT, self.dtype, SeenMask(), SinkScale(), queries).run(operands, tiles, pipes, tmem)
        elif warp < PRODUCER_WARP:
            cute.arch.setmaxregister_increase(OUTPUT_REGISTERS)
            OutputRole(SIXTEEN_BIT, self.dtype).run(operands, tiles, pipes, tmem)
        elif warp < MMA_WARP:
            cute.arch.setmaxregister_increase(PRODUCER_REGISTERS)
            columns = partial(columns_of_cta, self.config, self.dtype, memory)
            producer = RowProducer(columns, SlotKeys(self.config), SeenBits(), early=self.format.quantised > 0)
            producer.run(operands, tiles, pipes, warp - PRODUCER_WARP)
        else:
            cute.arch.setmaxregister_decrease(MMA_REGISTERS)
            if warp == MMA_WARP and cute.arch.block_idx_in_cluster() == EVEN_CTA:
                gemm = PairGemm(self.dtype, self.has_rope, tiles, tmem)
                MmaRole(SIXTEEN_BIT).run(operands.schedule, pipes, gemm)
        end(warp, MMA_WARP, tmem)


class SlotKeys:
    """The slots that the indices of this CTA's query token name."""

    def __init__(self, config: SparseDecodeConfig) -> None:
        self.config = config

    def key_list(self, operands: Operands, req: Int32) -> IndexList:
        """Return the indices of this CTA's query token."""
        return IndexList.create(operands, req)

    def first_key(self, begin_tile: Int32, warp: Int32) -> Int32:
        """Return the position of the lane's key, of a work tile's first tile."""
        return first_lane_key(begin_tile, warp)

    def look_up(self, keys: IndexList, position: Int32) -> Int32:
        """Return an index."""
        return look_up(keys, position)

    def locate(self, operands: Operands, keys: IndexList, found: Int32, position: Int32) -> ScaledKeys:
        """Return the where the slot of an index lies."""
        in_extra = keys.in_extra(position)
        row, scales = slot_address(operands, self.config, found, in_extra)
        if self.config.mixes_formats:
            return MixedKeys(pin_address(row), pin_address(scales), in_extra)
        return ScaledKeys(row, scales)


def build(config: SparseDecodeConfig, arch: Arch) -> KernelDefinition:
    """Return the variant, ready to compile."""
    kernel = SparseDecodeSm100(config, arch)
    return kernel.definition(
        smem_bytes=kernel.smem.nbytes,
        barriers=kernel.smem.barriers(),
        named_barriers=NAMED_BARRIERS,
        roles=role_table("gather"),
        expected={"UTCHMMA": SIXTEEN_BIT.products_per_tile(kernel.has_rope)},
        tmem_columns=TMEM_COLUMNS,
    )
