"""Warps, shared memory and registers of the SM90 kernel."""

from __future__ import annotations

from ...spec.mqa_logits import COLUMNS
from .smem import BLOCKS, HALVES, MqaLogitsSmem

WARPGROUP = 128
WARPS_PER_GROUP = WARPGROUP // 32
GROUPS = HALVES * BLOCKS  # of warps that compute, each with 64 keys, the rows of a product
COMPUTE_WARPS = GROUPS * WARPS_PER_GROUP
PAIR_THREADS = HALVES * WARPGROUP  # of a row block
LOAD_WARP = COMPUTE_WARPS  # the first one of the last warpgroup, whose others do nothing
THREADS = (GROUPS + 1) * WARPGROUP

LAUNCH_REGISTERS = 96  # a lane, of 640 threads
COMPUTE_REGISTERS = 112
LOAD_REGISTERS = 64
assert GROUPS * COMPUTE_REGISTERS + LOAD_REGISTERS <= 512, "registers of a lane of all warpgroups"

K_STEP = 32  # contraction depth of one WGMMA
K_STEPS = COLUMNS // K_STEP
KEY_STAGES = 8
ITEM_STAGES = 2

SMEM = MqaLogitsSmem.layout(KEY_STAGES, ITEM_STAGES)
