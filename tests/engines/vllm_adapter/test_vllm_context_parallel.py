"""Decode context parallelism with prefill: whole layers of vLLM on two ranks that share the keys of requests, in one process.

The ranks run one after the other. Their collectives read what the other rank gave in the round before, so that three rounds settle all of
them: gathered keys and queries, then states of attention, then their merge.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm._custom_ops
from torch import Tensor
from vllm.config import set_current_vllm_config
from vllm.model_executor.layers.attention import mla_attention
from vllm.v1.attention.backend import CommonAttentionMetadata

from cute_mla.spec.arch import Arch
from tests.engines.vllm_adapter.vllm_parts import (
    LATENT,
    ROPE,
    Request,
    Served,
    Setting,
    agree,
    batch_of,
    gather_keys,
    keys_of,
    layer_output,
    merged,
    query_rows,
    rows_of,
    serve,
)
from tests.support.launched import launched_ops

RANKS, HEADS = 2, 4
REQUESTS = [Request(1, 301), Request(1, 2), Request(20, 150), Request(9, 9)]


class Exchange:
    """Values that each rank gave to each collective, in the order of its calls."""

    def __init__(self) -> None:
        self.given: dict[int, list[Any]] = {rank: [] for rank in range(RANKS)}
        self.before = self.given
        self.rank = 0

    def begin(self) -> None:
        """Begin a round."""
        self.before, self.given = self.given, {rank: [] for rank in range(RANKS)}

    def give(self, value: Any) -> list[Any]:
        """Give a value and return all ranks' of the round before; this rank's own where the others have none yet."""
        mine = self.given[self.rank]
        mine.append(value)
        place = len(mine) - 1
        return [value if rank == self.rank or len(known) <= place else known[place] for rank, known in self.before.items()]


class Manager:
    """Stand-in for vLLM's MLADCPManager, whose collectives need a GPU."""

    def __init__(self, exchange: Exchange) -> None:
        self.exchange = exchange
        self.group = SimpleNamespace(rank_in_group=exchange.rank)

    def init_kv_gather(self, workspace: Tensor, rows: int) -> None:
        """Take the workspace that keys are gathered to."""

    def kv_gather(self, whole: Tensor, own: Tensor) -> None:
        """Write all ranks' keys, one behind the other."""
        whole.copy_(torch.cat(self.exchange.give(own.clone())))

    def query_gather(self, q: Tensor) -> Tensor:
        """Return the heads of all ranks."""
        return torch.cat(self.exchange.give(q.clone()), dim=1)

    def combine(self, out: Tensor, lse: Tensor, **_: Tensor) -> Tensor:
        """Return this rank's heads of the merged states."""
        states = self.exchange.give((out.clone(), lse.clone()))
        return merged(states)[:, self.exchange.rank * HEADS :][:, :HEADS].to(out.dtype).contiguous()


def local(keys: int, rank: int) -> int:
    """Return how many of a request's keys a rank has, which takes single keys in turn."""
    return (keys + RANKS - 1 - rank) // RANKS


def batch_on(rank: int) -> tuple[CommonAttentionMetadata, CommonAttentionMetadata]:
    """Return the batch over the pages of a rank as vLLM describes it, and with lengths of this rank's keys."""
    keys = [local(request.keys, rank) for request in REQUESTS]
    own = batch_of([Request(0, length) for length in keys], 64, seed=rank)
    batch = batch_of(REQUESTS, 64)
    batch.block_table_tensor, batch.dcp_local_seq_lens = own.block_table_tensor, own.seq_lens
    return batch, own


def served_on(rank: int, exchange: Exchange, folder: Path, cache: str, monkeypatch: pytest.MonkeyPatch) -> Served:
    """Return a rank's layer: its own heads, and the settings of two ranks."""
    exchange.rank = rank
    group = SimpleNamespace(world_size=RANKS, rank_in_group=rank)
    monkeypatch.setattr(mla_attention, "get_dcp_group", lambda: group)
    bound = type("Bound", (Manager,), {"__init__": lambda self, **_: Manager.__init__(self, exchange)})
    monkeypatch.setattr(mla_attention, "MLADCPManager", bound)
    served = serve(Setting(HEADS, cache=cache, ranks=RANKS), folder)
    served.layer.impl.need_to_return_lse_for_decode = True  # vLLM asks torch.distributed
    return served


def stored(served: Served, own: CommonAttentionMetadata, kv: Sequence[tuple[Tensor, Tensor]], rank: int) -> Tensor:
    """Return a rank's cache: every other key, NaN elsewhere."""
    cache = torch.full((int(own.block_table_tensor.max()) + 1, 64, LATENT + ROPE), torch.nan, dtype=torch.bfloat16)
    quantised = served.setting.cache == "fp8"
    cache = cache.to(torch.float8_e4m3fn) if quantised else cache
    for request, parts in enumerate(kv):
        blocks, rows = rows_of(own, request, 64)
        cache[blocks, rows] = torch.cat(parts, dim=1)[rank::RANKS].to(cache.dtype)
    return cache.view(torch.uint8) if quantised else cache


@pytest.fixture(autouse=True)
def _gathering(monkeypatch: pytest.MonkeyPatch) -> None:
    def gather(src_cache: Tensor, dst: Tensor, *, block_table: Tensor, cu_seq_lens: Tensor, batch_size: int, seq_starts: Tensor) -> None:
        """Torch for vLLM's op that gathers keys of a 16-bit cache. Rows of padding may be past a request's keys."""
        owners = torch.repeat_interleave(torch.arange(batch_size), cu_seq_lens.diff().long())
        options = {"token_to_seq": owners, "cu_seq_lens": cu_seq_lens, "seq_starts": seq_starts, "scale": torch.ones(())}
        gather_keys(src_cache, dst, block_table=block_table, num_tokens=len(dst), **options)

    monkeypatch.setattr(vllm._custom_ops, "cp_gather_cache", gather)


@pytest.mark.parametrize("cache", ["auto", "fp8"])
def test_decode_and_prefill_with_context(arch: Arch, cache: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    exchange = Exchange()
    parts = []
    generator = torch.Generator().manual_seed(6)
    for rank in range(RANKS):
        batch, own = batch_on(rank)
        served = served_on(rank, exchange, tmp_path, cache, monkeypatch)
        q = torch.randn(batch.num_actual_tokens, HEADS, 192, generator=generator).to(torch.bfloat16)
        kv = keys_of(batch, served.setting)
        parts.append((served, batch, q, kv, stored(served, own, kv, rank)))
    for _ in range(3):
        exchange.begin()
        outs, ops = [], []
        for exchange.rank, (served, batch, q, kv, storage) in enumerate(parts):
            new = [tuple(part[len(part) - request.tokens :] for part in both) for request, both in zip(REQUESTS, kv, strict=True)]
            latent, rotary = (torch.cat(part) for part in zip(*new, strict=True))
            out = torch.full((len(q), HEADS * 128), torch.nan, dtype=torch.bfloat16)
            with launched_ops(arch) as launched, set_current_vllm_config(served.config), torch.inference_mode():
                metadata = served.builder.build(0, batch)
                served.layer.forward_impl(q, latent, rotary.unsqueeze(1), storage, metadata, output=out)
            outs.append(out)
            ops.append(launched)
    assert (metadata.num_decodes, metadata.num_prefills) == (2, 2)
    assert all(launched == ["split_plan", "dense_prefill", "dense_prefill", "dense_decode", "combine"] for launched in ops)
    for (served, batch, q, kv, _), out in zip(parts, outs, strict=True):
        wanted = layer_output(served, batch, q, kv)
        for request in range(len(REQUESTS)):
            rows = query_rows(batch, request)
            if cache == "auto":
                agree(out[rows], wanted[rows], 2e-2)
            else:
                assert torch.nn.functional.cosine_similarity(out[rows].float().flatten(), wanted[rows].flatten(), dim=0) > 0.995
