"""Masked dense prefill on Blackwell: items come in parts, with their visible key tiles, and scores are masked.

The rest is dense_prefill/sm100.py.

Formula, with the mask m of the caller, which all heads share:

    s_rj = <q_r, k_j> where m_rj and, causal, j <= r + s_k - s_q; else -inf     p = softmax(scale * s)     out_r = sum_j p_rj v_j

Roles, shared and tensor memory and pipelines are those of dense_prefill/sm100.py, but for these:
  items    warp 14: finds the CTA's items, reads the mask of their rows, 32 key tiles at a time, and posts the tiles in which a bit is
           set; the other roles, the load role among them, walk these tiles alone. Both Q tiles take all of them
  softmax  loads the mask of its row a tile ahead, and sets hidden scores to -inf

item_free has 14 arrivals: the load role takes items, too. README.md has the cost.
"""

from __future__ import annotations

from ...spec.arch import Arch
from ...spec.dense_prefill import DensePrefillConfig
from ..definition import KernelDefinition
from ..dense_prefill.sm100 import definition
from .abi import MaskedPrefillAbi
from .sm100_mask import RowMask


def build(config: DensePrefillConfig, arch: Arch) -> KernelDefinition:
    """Return the variant, ready to compile."""
    return definition(MaskedPrefillAbi(config, arch, RowMask))
