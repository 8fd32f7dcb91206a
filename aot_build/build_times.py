"""Shares of kernels in the time of a build: seconds that one core needs for a kernel, recorded by op.

The table has the mean CPU seconds of one kernel for each architecture, its process included, in a whole build of 194 s. Machines differ by
far more than kernels do, so a build tells the time left from its first kernel on, by its own pace. Longest kernels start first, so that no
process is left with a long one at the end.
"""

from __future__ import annotations

from .variants import Variant

SECONDS: dict[str, float] = {
    "dense_decode": 2.1,
    "sparse_decode": 2.1,
    "dense_prefill": 2.1,
    "masked_prefill": 2.1,
    "sparse_prefill": 1.6,
    "dense_prefill_dq": 1.6,
    "dense_prefill_dkdv": 1.5,
    "split_plan": 0.8,
    "combine": 0.9,
    "merge_states": 0.7,
    "mqa_logits": 1.3,
    "topk_indices": 1.3,
    "index_write": 0.7,
    "cache_write": 0.6,
    "cache_insert": 0.9,
    "cache_gather": 0.6,
}
_OTHER = 2.0  # an op that the table lacks


def seconds_of(variant: Variant) -> float:
    """Return the seconds that one core needed for a kernel of this op."""
    return SECONDS.get(variant.op, _OTHER)
