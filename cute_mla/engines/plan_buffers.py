"""Persistent buffers for decode plans, which CUDA graphs read at fixed addresses."""

from __future__ import annotations

from typing import TypeAlias

import torch

Plan: TypeAlias = tuple[torch.Tensor, torch.Tensor]  # tile_scheduler_metadata and num_splits


class PlanBuffers:
    """Buffers for plans, one pair per key, such as the query tokens per request. The key determines the number of parts of a plan."""

    def __init__(self, max_requests: int) -> None:
        self._max_requests = max_requests
        self._buffers: dict[int, Plan] = {}

    def store(self, key: int, plan: Plan) -> Plan:
        """Copy a plan to the buffers of its key and return the copy.

        The first plan of a key allocates buffers for max_requests requests, or for its own requests if there are more.
        """
        metadata, num_splits = plan
        if key not in self._buffers:
            requests = max(self._max_requests, num_splits.shape[0] - 1)
            self._buffers[key] = torch.empty_like(metadata), num_splits.new_empty(requests + 1)
        metadata_buffer, splits_buffer = self._buffers[key]
        return metadata_buffer.copy_(metadata), splits_buffer[: num_splits.shape[0]].copy_(num_splits)
