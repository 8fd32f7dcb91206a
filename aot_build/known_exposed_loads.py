"""Exposed global loads of main loops that the build accepts, by kernel and opcode; see simulator/sass/exposed_loads.py.

The table only shrinks: the gate fails on a load that is not here, and on an entry that the machine code no longer needs.
"""

from __future__ import annotations

from collections.abc import Mapping

# fmt: off
KNOWN_EXPOSED_LOADS: dict[str, Mapping[str, int]] = {
    "dense_prefill_sm100_bf16_d128_elements": {"LDG.E.U16": 32},
    "dense_prefill_sm100_bf16_d192_elements": {"LDG.E.U16": 48},
    "dense_prefill_sm100_bf16_d256_elements": {"LDG.E.U16": 29},
    "dense_prefill_sm100_fp16_d128_elements": {"LDG.E.U16": 32},
    "dense_prefill_sm100_fp16_d192_elements": {"LDG.E.U16": 48},
    "dense_prefill_sm100_fp16_d256_elements": {"LDG.E.U16": 29},
    "dense_prefill_dkdv_sm100_bf16_d128": {"LDG.E": 4},
    "dense_prefill_dkdv_sm100_bf16_d192": {"LDG.E": 4},
    "dense_prefill_dkdv_sm100_fp16_d128": {"LDG.E": 4},
    "dense_prefill_dkdv_sm100_fp16_d192": {"LDG.E": 4},
    "dense_prefill_dkdv_sm90_bf16_d128": {"LDG.E": 4},
    "dense_prefill_dkdv_sm90_bf16_d192": {"LDG.E": 4},
    "dense_prefill_dkdv_sm90_fp16_d128": {"LDG.E": 4},
    "dense_prefill_dkdv_sm90_fp16_d192": {"LDG.E": 4},
    "dense_prefill_dq_sm100_bf16_d128": {"LDG.E.128": 16},
    "dense_prefill_dq_sm100_bf16_d128_elements": {"LDG.E.U16": 48},
    "dense_prefill_dq_sm100_bf16_d192": {"LDG.E.128": 16},
    "dense_prefill_dq_sm100_bf16_d192_elements": {"LDG.E.U16": 56},
    "dense_prefill_dq_sm100_fp16_d128": {"LDG.E.128": 15},
    "dense_prefill_dq_sm100_fp16_d128_elements": {"LDG.E.U16": 48},
    "dense_prefill_dq_sm100_fp16_d192": {"LDG.E.128": 15},
    "dense_prefill_dq_sm100_fp16_d192_elements": {"LDG.E.U16": 56},
    "sparse_prefill_sm100_bf16_d512_cluster2": {"LDG.E": 2},
    "sparse_prefill_sm100_bf16_d512_cluster2_elements": {"LDG.E": 2},
    "sparse_prefill_sm100_bf16_d576_cluster2": {"LDG.E": 2},
    "sparse_prefill_sm100_bf16_d576_cluster2_elements": {"LDG.E": 2},
    "sparse_prefill_sm100_fp16_d512_cluster2": {"LDG.E": 2},
    "sparse_prefill_sm100_fp16_d512_cluster2_elements": {"LDG.E": 2},
    "sparse_prefill_sm100_fp16_d576_cluster2": {"LDG.E": 2},
    "sparse_prefill_sm100_fp16_d576_cluster2_elements": {"LDG.E": 2},
    "sparse_prefill_sm90_bf16_d512_cluster1": {"LDG.E": 7},
    "sparse_prefill_sm90_bf16_d512_cluster1_elements": {"LDG.E": 7},
    "sparse_prefill_sm90_bf16_d512_cluster2": {"LDG.E": 7},
    "sparse_prefill_sm90_bf16_d576_cluster1": {"LDG.E": 7},
    "sparse_prefill_sm90_bf16_d576_cluster1_elements": {"LDG.E": 7},
    "sparse_prefill_sm90_bf16_d576_cluster2": {"LDG.E": 7},
    "sparse_prefill_sm90_fp16_d512_cluster1": {"LDG.E": 7},
    "sparse_prefill_sm90_fp16_d512_cluster1_elements": {"LDG.E": 7},
    "sparse_prefill_sm90_fp16_d512_cluster2": {"LDG.E": 7},
    "sparse_prefill_sm90_fp16_d576_cluster1": {"LDG.E": 7},
    "sparse_prefill_sm90_fp16_d576_cluster1_elements": {"LDG.E": 7},
    "sparse_prefill_sm90_fp16_d576_cluster2": {"LDG.E": 7},
}
# fmt: on
