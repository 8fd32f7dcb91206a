"""How key tiles are shared out among the SMs: planned on the device, kept for calls of the same shapes."""

from __future__ import annotations

from typing import NamedTuple

import torch

from .runtime.device import Device
from .spec.split_plan import PLAN_COLUMNS, SplitPlanConfig
from .tensors import TensorSpec, check_contiguous, check_device, check_dtype, check_shape


class ScheduleKey(NamedTuple):
    """The shapes that a schedule is made for. topk, extra_topk: None in dense decode."""

    batch: int
    s_q: int
    h_q: int
    h_kv: int
    page_size: int
    num_parts: int
    device: torch.device
    topk: int | None = None
    extra_topk: int | None = None


class KeyCounts(NamedTuple):
    """The keys of each request in its cache and in a second one: int32 [batch], or None where all have the limit."""

    lengths: torch.Tensor | None
    extra_lengths: torch.Tensor | None
    limit: int
    extra_limit: int


class PlanSpecs(NamedTuple):
    """The specs of a plan's two tensors."""

    metadata: TensorSpec
    num_splits: TensorSpec


class MlaSchedule:
    """What get_mla_metadata() returns: empty until its first use by flash_mla_with_kvcache, which plans it on the device.

    plan: tile_scheduler_metadata, int32 [num_sm_parts, 8], and num_splits, int32 [batch + 1], after the first use, else None.
    """

    def __init__(self) -> None:
        self.plan: tuple[torch.Tensor, torch.Tensor] | None = None
        self._key: ScheduleKey | None = None

    @property
    def tile_scheduler_metadata(self) -> torch.Tensor | None:
        """The first tensor of the plan, if it has been made."""
        return None if self.plan is None else self.plan[0]

    @property
    def num_splits(self) -> torch.Tensor | None:
        """The second one."""
        return None if self.plan is None else self.plan[1]

    def keep(self, key: ScheduleKey, plan: tuple[torch.Tensor, torch.Tensor]) -> None:
        """Takes a plan that was made for these shapes."""
        self._key = key
        self.plan = plan

    def serves(self, key: ScheduleKey) -> bool:
        """Whether it has no plan yet, or one for these shapes."""
        return self._key is key or self._key is None or self._key == key

    def check(self, key: ScheduleKey) -> None:
        """ValueError if it was planned for other shapes."""
        if self._key is not None and not self.serves(key):
            changed = ", ".join(
                f"{name} {new} after {old}" for name, old, new in zip(key._fields, self._key, key, strict=True) if old != new
            )
            raise ValueError(
                f"tile_scheduler_metadata was planned for other shapes: {changed}; supported: one schedule per set of shapes, "
                "get another from get_mla_metadata()"
            )

    def prepare(self, device: Device, key: ScheduleKey, counts: KeyCounts) -> tuple[torch.Tensor, torch.Tensor]:
        """Makes the plan for these shapes."""
        made = plan(device, counts, key.batch, key.num_parts, key.device)
        self.keep(key, made)
        return made


def plan(device: Device, counts: KeyCounts, batch: int, num_parts: int, where: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Allocates and computes tile_scheduler_metadata int32 [num_parts, 8] and num_splits int32 [batch + 1], `where` they go."""
    make = torch.empty if batch else torch.zeros
    metadata = make((num_parts, PLAN_COLUMNS), dtype=torch.int32, device=where)
    num_splits = make((batch + 1,), dtype=torch.int32, device=where)
    if batch:
        device.undefined(metadata, num_splits)
        kernel = device.kernel("split_plan", SplitPlanConfig().name)
        limits = (counts.limit, counts.extra_limit)
        device.launch(kernel, (1, 1, 1), (counts.lengths, counts.extra_lengths, metadata, num_splits, batch, num_parts, *limits))
    return metadata, num_splits


def check_plan(specs: PlanSpecs, batch: int, num_parts: int, device: torch.device) -> None:
    """ValueError unless the tensors can be a plan of so many parts for this batch."""
    check_shape("tile_scheduler_metadata", specs.metadata, ("num_sm_parts", PLAN_COLUMNS))
    parts = specs.metadata.shape[0]
    if parts != num_parts:
        raise ValueError(
            f"tile_scheduler_metadata has {parts} rows; supported: {num_parts}, as get_mla_metadata returns for this call's "
            "s_q * h_q / h_kv, h_kv and device"
        )
    check_shape("num_splits", specs.num_splits, (batch + 1,))
    for name, spec in (("tile_scheduler_metadata", specs.metadata), ("num_splits", specs.num_splits)):
        check_dtype(name, spec, torch.int32)
        check_device(name, spec, device)
        check_contiguous(name, spec)
