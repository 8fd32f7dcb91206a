"""Exposed global loads of main loops that the build accepts, by kernel and opcode; see simulator/sass/exposed_loads.py.

The table only shrinks: the gate fails on a load that is not here, and on an entry that the machine code no longer needs.
"""

from __future__ import annotations

from collections.abc import Mapping

from cute_mla.manifest import kernel_name
from cute_mla.spec import sparse_prefill_dkv
from cute_mla.spec.dense_decode import TILINGS, closed_variants
from cute_mla.spec.kernel_ops import ARCHS_OF

# Words of tree_mask and, where requests have different numbers of query tokens, what the table of units says, for each row of a thread: one
# where CTAs are paired or divide columns, else two. Only the tiles with new tokens load them, and only in calls with a tree.
_TREE_WORDS = {True: 8, False: 16}
# The scout of paired CTAs reads plan, lengths and units once a work tile, and waits for a free record in the same loop.
_SCOUT_LOADS = {True: 11, False: 0}

# fmt: off
KNOWN_EXPOSED_LOADS: dict[str, Mapping[str, int]] = {
    **{
        kernel_name("dense_decode", arch.name, config.name): {
            "LDG.E": _TREE_WORDS[TILINGS[arch.name].paired or config.column_ctas > 1]
            + _SCOUT_LOADS[TILINGS[arch.name].paired]
            - 2 * (TILINGS[arch.name].paired and config.column_ctas > 1)  # which looks for Q behind its loop over tiles
        }
        for arch in ARCHS_OF["dense_prefill_backward"]
        for config in closed_variants(arch)
        if config.key_masks
    },
    "dense_decode_sm100_bf16_fp8_cluster2": {"LDG.E": _SCOUT_LOADS[True]},
    # the warp that loads Q reads the plan once a work tile: the loop has no smaller one
    "dense_decode_sm100_bf16_few_heads": {"LDG.E": 8},
    "dense_decode_sm100_bf16_fp8_few_heads": {"LDG.E": 8},
    "dense_decode_sm100_bf16_fp8_few_heads32": {"LDG.E": 8},
    "dense_decode_sm100_bf16_fp8_few_heads64": {"LDG.E": 8},
    "dense_prefill_dkdv_sm100_bf16_d128": {"LDG.E": 4},
    "dense_prefill_dkdv_sm100_bf16_d192": {"LDG.E": 4},
    "dense_prefill_dkdv_sm100_bf16_d256": {"LDG.E": 4},
    "dense_prefill_dkdv_sm90_bf16_d128": {"LDG.E": 4},
    "dense_prefill_dkdv_sm90_bf16_d192": {"LDG.E": 4},
    "dense_prefill_dkdv_sm90_bf16_d256": {"LDG.E": 4},
    "dense_prefill_dq_sm100_bf16_d128": {"LDG.E.128": 16},
    "dense_prefill_dq_sm100_bf16_d192": {"LDG.E.128": 16},
    "dense_prefill_dq_sm100_bf16_d256": {"LDG.E.128": 16},
    # the warp that finds visible tiles reads the words of four rows, and looks at them
    "masked_prefill_sm100_bf16_d128": {"LDG.E": 16},
    "masked_prefill_sm100_bf16_d192": {"LDG.E": 16},
    "masked_prefill_sm120_bf16_d128": {"LDG.E": 8},
    "masked_prefill_sm120_bf16_d192": {"LDG.E": 8},
    "masked_prefill_sm90_bf16_d128": {"LDG.E": 16},
    "masked_prefill_sm90_bf16_d192": {"LDG.E": 16},
    # warps that do nothing but bring keys wait for them, a stage ahead of the products
    **{f"dense_decode_sm120_{dtype}_cluster1": {"LDG.E": 9, "LDG.E.128": 18} for dtype in ("bf16", "fp16")},  # and words of a tree
    **{f"dense_decode_sm120_bf16_{kind}_cluster1": {"LDG.E": 1, "LDG.E.128": 9} for kind in ("fp8_cache", "fp8")},
    "dense_decode_sm120_bf16_d512_cluster1": {"LDG.E": 9, "LDG.E.128": 16},
    "dense_decode_sm120_bf16_d320_cluster1": {"LDG.E": 9, "LDG.E.128": 10},
    # pages, likewise, and what the table of units says
    **{f"dense_decode_sm120_{dtype}_rows64": {"LDG.E": 11} for dtype in ("bf16", "fp16", "bf16_d512", "bf16_d320")},
    **{f"dense_decode_sm120_bf16_{kind}_rows64": {"LDG.E": 3} for kind in ("fp8_cache", "fp8")},
    "sparse_decode_sm120_bf16_latent_cluster1": {"LDG.E.128": 18},
    "sparse_decode_sm120_bf16_fp8_584_cluster1": {"LDG.E.128": 9, "LDG.E.U8": 7},
    "sparse_decode_sm120_bf16_fp8_656_cluster1": {"LDG.E": 7, "LDG.E.128": 10},
    "sparse_decode_sm120_bf16_nope_528_cluster1": {"LDG.E": 8, "LDG.E.128": 8},
    "sparse_decode_sm120_bf16_v41_cluster1": {"LDG.E.128": 8, "LDG.E.U8": 8},
    "sparse_decode_sm120_bf16_v41_fp4_cluster1": {"LDG.E.128": 5, "LDG.E.U8": 6},
    # the index of a key of the next stage, ahead of the wait for a place
    **{f"sparse_prefill_sm120_bf16_d{d_qk}_{form}": {"LDG.E": 1} for d_qk in (512, 576) for form in ("cluster1", "rows64")},
    # the same, behind the copies of this stage, of either cache
    "sparse_decode_sm120_bf16_latent_rows64": {"LDG.E": 2},
    **{f"sparse_decode_sm120_bf16_{cache}_rows64": {"LDG.E": 1} for cache in ("fp8_656", "nope_528")},
    # the output role asks for Q of the next token and waits a token long for a barrier before it uses it; the score role likewise
    "sparse_prefill_dq_sm100_bf16_d512_cluster1": {"LDG.E": 4, "LDG.E.128": 30, "LDG.E.ENL2.256": 16},
    "sparse_prefill_dq_sm100_bf16_d512_cluster2": {"LDG.E": 5, "LDG.E.128": 29, "LDG.E.ENL2.256": 16},
    "sparse_prefill_dq_sm100_bf16_d576_cluster2": {"LDG.E": 4, "LDG.E.128": 33, "LDG.E.ENL2.256": 18},
    "sparse_prefill_dq_sm100_bf16_d576_cluster1": {"LDG.E": 5, "LDG.E.128": 32, "LDG.E.ENL2.256": 18},
    "sparse_prefill_sm100_bf16_d512_cluster1": {"LDG.E": 2},
    "sparse_prefill_sm100_bf16_d512_cluster2": {"LDG.E": 2},
    "sparse_prefill_sm100_bf16_d576_cluster1": {"LDG.E": 2},
    "sparse_prefill_sm100_bf16_d576_cluster2": {"LDG.E": 2},
    # looks at the indices of the next token, as that of sparse_prefill
    **{
        kernel_name("sparse_prefill_dkv", arch.name, config.name): {"LDG.E": 7}
        for arch in ARCHS_OF["sparse_prefill"]
        for config in sparse_prefill_dkv.closed_variants(arch)
    },
    **{f"sparse_prefill_dq_sm90_bf16_d{d_qk}_cluster1": {"LDG.E": 7} for d_qk in (512, 576)},
    "sparse_prefill_sm90_bf16_d512_cluster1": {"LDG.E": 7},
    "sparse_prefill_sm90_bf16_d512_cluster2": {"LDG.E": 7},
    "sparse_prefill_sm90_bf16_d576_cluster1": {"LDG.E": 7},
    "sparse_prefill_sm90_bf16_d576_cluster2": {"LDG.E": 7},
}
# fmt: on
