"""Context parallelism in the layer: keys of attention and of the indexer over processes, through gloo, against all keys in one place."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.multiprocessing.spawn import spawn

import cute_mla
from cute_mla.layer import MlaAttention, plan_batch
from cute_mla.parallel import ContextParallel, ContextShard
from tests.layer.context_ranks import DistributedSteps, rank_main
from tests.layer.dsa_models import V3_2
from tests.layer.mla_models import GLM_5, MISTRAL_SMALL_4, SCALED_GATED, V3
from tests.layer.mla_steps import TOLERANCE, Sequences

# Two decodes, a prefill behind cached keys and one without; more and fewer keys than are chosen; ranks without keys of a request
SPARSE = DistributedSteps(V3_2, (40, 1, 18, 0), (41, 2, 20, 3), 2, 1)
STEPS = {
    ("sm90", 2): [SPARSE, DistributedSteps(V3, (30, 1, 70, 0), (32, 3, 71, 2), 2, 4)],
    ("sm100", 3): [DistributedSteps(GLM_5, (33, 2, 17), (35, 4, 18), 2, 16), DistributedSteps(V3_2, (8, 3), (9, 4), 2, 1, "fp8_656")],
}


@pytest.mark.parametrize(("arch", "world"), [("sm90", 2), pytest.param("sm100", 3, marks=pytest.mark.slow)])
def test_ranks_add_up_to_all_keys_in_one_place(arch: str, world: int, tmp_path: Path) -> None:
    """Sparse over any number of ranks, dense, and requests of at most topk keys whose cache only sparse decode reads."""
    steps = STEPS[(arch, world)]
    spawn(rank_main, (world, arch, steps, tmp_path), nprocs=world)
    of_ranks = [torch.load(tmp_path / f"rank{rank}.pt") for rank in range(world)]
    for number, one in enumerate(steps):
        out, expected = sum(own[number].float() for own in of_ranks), one.undistributed().float()
        assert (out - expected).abs().max() <= TOLERANCE[torch.bfloat16] * expected.abs().max(), one


class Alone(ContextParallel):
    """The only rank, without a group."""

    def __init__(self) -> None:
        self.group, self.shard = None, ContextShard(0, 1)


def test_what_is_refused() -> None:
    sequences = SPARSE.sequences()
    with pytest.raises(ValueError, match="the layer has a context, and there are no kernels on cpu; supported: devices with kernels"):
        SPARSE.run(sequences, sequences.layer(context=Alone()))
    decodes = sequences.until((2, 2, 0, 0))
    with (
        cute_mla.simulate("sm90", 2),
        pytest.raises(ValueError, match="decode requests have no share of the rank; supported: plan_batch"),
    ):
        decodes.step([1, 1, 0, 0], 2, decodes.layer(context=Alone()))
    other = Sequences.drawn(MISTRAL_SMALL_4, [3]).layer()
    with pytest.raises(ValueError, match="a context is given, and keys have 320 columns; supported: 576"):
        MlaAttention(other.config, other.weights, context=Alone())
    sinks = Sequences.drawn(SCALED_GATED, [3]).layer()
    with pytest.raises(ValueError, match="a context is given, and the config has attention_sinks; supported: one of them"):
        MlaAttention(sinks.config, sinks.weights, context=Alone())


def test_slots_and_room_of_a_rank() -> None:
    """Three ranks, blocks of 16 keys: of 100 keys rank 1 has 32, in half a page, and of 220 keys it has 76, in more than one."""

    class Second(ContextParallel):
        def __init__(self) -> None:
            self.group, self.shard = None, ContextShard(1, 3, 16)

    table = torch.tensor([[5], [7]], dtype=torch.int32)
    batch = plan_batch([100, 1], [0, 16], table, 64, context=Second())
    slots = batch.slot_mapping
    assert slots[:16].eq(-1).all()
    assert slots[16:32].tolist() == list(range(5 * 64, 5 * 64 + 16))
    assert slots[64:80].tolist() == list(range(5 * 64 + 16, 5 * 64 + 32))
    assert slots[100].item() == 7 * 64
    with pytest.raises(
        ValueError, match=r"request 1 has 0 \+ 220 keys, 76 of them on this rank; supported with this block table: up to 64"
    ):
        plan_batch([1, 220], [0, 0], table, 64, context=Second())
