"""Persistent buffers for decode plans, which CUDA graphs read at fixed addresses."""

from __future__ import annotations

from typing import TypeAlias

import torch

Plan: TypeAlias = tuple[torch.Tensor, torch.Tensor]  # tile_scheduler_metadata and num_splits


class PlanBuffers:
    """Buffers for plans, one pair per key, such as the query tokens per request. The key determines the number of parts of a plan.

    max_units: the most work units of a plan: requests or, where these have different numbers of query tokens, groups of their tokens.
    """

    def __init__(self, max_units: int) -> None:
        self._max_units = max_units
        self._buffers: dict[int, Plan] = {}

    def store(self, key: int, plan: Plan) -> Plan:
        """Copy a plan to the buffers of its key and return the copy.

        The first plan of a key allocates buffers for max_units units, or for its own units if there are more.
        """
        metadata, num_splits = plan
        if key not in self._buffers:
            units = num_splits.shape[0] - 1
            room = max(self._max_units - units, 0)
            self._buffers[key] = metadata.new_empty(metadata.shape[0] + room, metadata.shape[1]), num_splits.new_empty(units + room + 1)
        metadata_buffer, splits_buffer = self._buffers[key]
        return metadata_buffer[: metadata.shape[0]].copy_(metadata), splits_buffer[: num_splits.shape[0]].copy_(num_splits)
