"""Layers whose keys are distributed over processes: two steps of one rank, and what the layer gives with all keys in one place."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import cute_mla
from cute_mla.layer import MlaAttention, Shard
from cute_mla.parallel import ContextParallel
from tests.layer.dsa_models import indexer_checkpoint
from tests.layer.dsa_steps import SparseSequences
from tests.layer.mla_models import checkpoint

HEADS = 6  # of two ranks or of three


@dataclass(frozen=True)
class DistributedSteps:
    """A step that puts contexts into the caches, and one behind them. sizes: of the indexer. cache: as in SparseSequences.drawn."""

    model: dict[str, Any]
    contexts: tuple[int, ...]
    ends: tuple[int, ...]
    decodes: int
    interleave: int
    cache: str = "latent"
    topk: int = 16

    def sequences(self) -> SparseSequences:
        """Return the sequences, over empty caches."""
        drawn = SparseSequences.drawn(self.model, self.ends, torch.bfloat16, self.cache, topk=self.topk)
        config = {**drawn.own.config, "num_attention_heads": HEADS}
        weights = (indexer_checkpoint if self.has_indexer else checkpoint)(config, torch.bfloat16)
        if not self.has_indexer:
            del config["index_topk"]
        return replace(drawn, own=replace(drawn.own, config=config, weights=weights))

    @property
    def has_indexer(self) -> bool:
        """Return whether the model has one."""
        return "index_topk" in self.model

    def run(self, sequences: SparseSequences, layer: MlaAttention, **options: Any) -> Tensor:
        """Return the output of the second step."""
        sequences.until(self.contexts).step([0] * len(self.contexts), 0, layer, **options)
        out, _ = sequences.step(self.contexts, self.decodes, layer, chunk_tokens=60, **options)
        return out

    def on_rank(self, context: ContextParallel) -> Tensor:
        """Return the partial output of a rank, whose pages lie in an order of its own."""
        rank, sequences = context.shard.rank, self.sequences()
        own, table = sequences.own, sequences.own.block_table
        if rank % 2:
            sequences = replace(
                sequences, own=replace(own, block_table=torch.where(table < len(own.k_cache), len(own.k_cache) - table, table))
            )
        layer = sequences.layer(indexed=self.has_indexer, shard=Shard(rank, context.shard.world), context=context)
        return self.run(sequences, layer, context=context)

    def undistributed(self) -> Tensor:
        """Return the output with all keys and heads in one place, by the layer's reference path."""
        sequences = self.sequences()
        return self.run(sequences, sequences.layer(indexed=self.has_indexer))


def rank_main(rank: int, world: int, arch: str, steps: list[DistributedSteps], folder: Path) -> None:
    """Run every pair of steps in one process of a group, and leave the partial outputs in a file."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/store", timedelta(seconds=300), world, rank)
    with cute_mla.simulate(arch, 2):
        outs = [each.on_rank(ContextParallel(interleave=each.interleave)) for each in steps]
    torch.save(outs, folder / f"rank{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()
