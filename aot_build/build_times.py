"""Expected time of a build: seconds that one core needs for a kernel, recorded by op.

The table has the mean CPU seconds of one kernel for each architecture, its process included. They are scaled so that all kernels together
take the 194 s of a recorded whole build. A build starts from the table and corrects the time left by its own pace. Longest kernels start
first, so that no process is left with a long one at the end.
"""

from __future__ import annotations

from collections.abc import Sequence

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
    """Return the seconds that one core is expected to need for a kernel."""
    return SECONDS.get(variant.op, _OTHER)


def expected_seconds(variants: Sequence[Variant], jobs: int) -> float:
    """Return the seconds that so many processes are expected to need for these kernels, longest kernels first."""
    busy = [0.0] * jobs
    for seconds in sorted(map(seconds_of, variants), reverse=True):
        busy[busy.index(min(busy))] += seconds
    return max(busy)
