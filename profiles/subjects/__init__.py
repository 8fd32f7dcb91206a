"""What is timed: a subject for each op that has benchmark rows."""

from __future__ import annotations

from typing import Any

import torch

from ..rows import Case
from .cache_write import CacheWrite
from .combine import Combine
from .dense_decode import DenseDecode
from .dense_prefill import DensePrefill
from .merge_states import MergeStates
from .sparse_decode import SparseDecode
from .sparse_prefill import SparsePrefill
from .subject import Subject

SUBJECTS: dict[str, type[Subject[Any]]] = {
    "dense_decode": DenseDecode,
    "sparse_decode": SparseDecode,
    "sparse_prefill": SparsePrefill,
    "dense_prefill": DensePrefill,
    "combine": Combine,
    "merge_states": MergeStates,
    "cache_write": CacheWrite,
}


def make_subject(case: Case, device: torch.device, l2_bytes: int) -> Subject[Any]:
    """The operands of a case on a device. l2_bytes: of the device, which decides how many sets there are."""
    return SUBJECTS[case.op](case, device, l2_bytes)
