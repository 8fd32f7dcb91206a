"""Objects that users hold, as they print: short, with shapes in place of contents. Those of the layer are tested beside it."""

from __future__ import annotations

import torch

import cute_mla
from cute_mla.flash_mla import FlashMLASchedMeta
from cute_mla.parallel import ContextShard, LocalIndices, ShardedRequests
from cute_mla.spec.arch import Arch
from tests.support.recording_device import RecordingDevice
from tests.support.right_calls import call_of, planned


def test_a_schedule_prints_the_shapes_that_it_was_planned_for() -> None:
    for schedule in (cute_mla.get_mla_metadata()[0], FlashMLASchedMeta()):
        name = type(schedule).__name__
        assert repr(schedule) == f"{name}(not planned)"
        with RecordingDevice().active():
            call_of("dense", h_q=16).run(**planned((schedule, None)))
        assert repr(schedule) == f"{name}(batch=2, s_q=1, h_q=16, h_kv=1, page_size=64, num_parts=132, device=cpu)"


def test_a_simulated_device_prints_what_it_ran(arch: Arch) -> None:
    with cute_mla.simulate(arch, 4, "random", 7) as device:
        begin = f"SimulatedDevice({arch.name}, 4 SMs, schedule random, seed 7: "
        assert repr(device) == f"{begin}0 launches, 0 instructions, 0 findings)"
        cute_mla.get_mla_metadata(torch.zeros(2, dtype=torch.int32), 16, 1)
        assert repr(device) == f"{begin}1 launches, {device.instructions} instructions, 0 findings)"


def test_shares_of_a_cache_print_shapes() -> None:
    ints = torch.zeros(2, 3, dtype=torch.int32)
    assert repr(ContextShard(1, 4)) == "ContextShard(rank=1, world=4, interleave=1)"
    assert repr(LocalIndices(ints, ints[0])) == "LocalIndices(indices=<int32 [2, 3] on cpu>, topk_length=<int32 [3] on cpu>)"
    requests = ShardedRequests(ints, ints[:, 0], 1, 1)
    assert repr(requests).startswith("ShardedRequests(block_table=<int32 [2, 3] on cpu>, cache_seqlens=<int32 [2] on cpu>, s_q=1, ")
    assert repr(requests).endswith("schedule=MlaSchedule(not planned))")
