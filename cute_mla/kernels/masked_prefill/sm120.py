"""Masked dense prefill on RTX boards and DGX Spark: items come in parts, with their visible key tiles, and scores are masked.

The rest is dense_prefill/sm120.py.

Formula, with the mask m of the caller, which all heads share:

    s_rj = <q_r, k_j> where m_rj and, causal, j <= r + s_k - s_q; else -inf     p = softmax(scale * s)     out_r = sum_j p_rj v_j

Roles, shared memory and pipelines are those of dense_prefill/sm120.py, but for these:
  items    warp 2: also reads the mask of an item's rows, 32 key tiles at a time, and posts the tiles in which a bit is set; the other
           roles walk these tiles alone
  attend   loads the mask of its rows while S is multiplied, and sets hidden scores to -inf before the softmax

README.md has the cost of both.
"""

from __future__ import annotations

from ...spec.arch import Arch
from ...spec.dense_prefill import DensePrefillConfig
from ..definition import KernelDefinition
from ..dense_prefill.sm120 import definition
from .abi import MaskedPrefillAbi
from .sm120_mask import WordMask


def build(config: DensePrefillConfig, arch: Arch) -> KernelDefinition:
    """Return the variant, ready to compile."""
    return definition(MaskedPrefillAbi(config, arch, WordMask))
