"""Plans of decode where CUDA graphs find them again."""

from __future__ import annotations

from typing import TypeAlias

import torch

Plan: TypeAlias = tuple[torch.Tensor, torch.Tensor]  # tile_scheduler_metadata and num_splits


class PlanPlaces:
    """Places of plans, one for each key, such as the query tokens of a request: a plan's number of parts must depend on it alone."""

    def __init__(self, most_requests: int) -> None:
        self._most_requests = most_requests
        self._places: dict[int, Plan] = {}

    def keep(self, key: int, made: Plan) -> Plan:
        """The plan, copied to where the one before with this key lay. The first one makes room for most_requests requests, or its own."""
        metadata, num_splits = made
        if key not in self._places:
            requests = max(self._most_requests, num_splits.shape[0] - 1)
            self._places[key] = torch.empty_like(metadata), num_splits.new_empty(requests + 1)
        kept, kept_splits = self._places[key]
        return kept.copy_(metadata), kept_splits[: num_splits.shape[0]].copy_(num_splits)
