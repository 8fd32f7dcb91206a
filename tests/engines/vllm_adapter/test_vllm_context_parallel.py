"""Decode context parallelism with prefill: whole layers of vLLM on two ranks that share the keys of requests, in one process.

The ranks run one after the other. Their collectives read what the other rank gave in the round before, so that three rounds settle all of
them: gathered keys and queries, then states of attention, then their merge.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm._custom_ops
from torch import Tensor
from vllm.config import set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.model_executor.layers.attention import mla_attention, sparse_mla_attention
from vllm.v1.attention.backend import CommonAttentionMetadata

from cute_mla.engines.vllm import dense, sparse
from cute_mla.reference import attention
from cute_mla.spec.arch import Arch
from tests.engines.vllm_adapter.vllm_parts import (
    LATENT,
    LAYER,
    ROPE,
    SCALE,
    Request,
    Served,
    Setting,
    agree,
    batch_of,
    gather_keys,
    keys_of,
    layer_output,
    merged,
    rows_of,
    serve,
)
from tests.support.launched import launched_ops

RANKS, HEADS = 2, 4
SINKS = torch.linspace(-2, 5, RANKS * HEADS)
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


def positions(keys: int, rank: int, interleave: int) -> Tensor:
    """Return the positions of a request's keys that a rank has, which takes this many keys in turn."""
    place = torch.arange(keys)
    return place[place // interleave % RANKS == rank]


def batch_on(requests: list[Request], rank: int, interleave: int) -> tuple[CommonAttentionMetadata, CommonAttentionMetadata]:
    """Return the batch over the pages of a rank as vLLM describes it, and with lengths of this rank's keys."""
    keys = [len(positions(request.keys, rank, interleave)) for request in requests]
    own = batch_of([Request(0, length) for length in keys], 64, seed=rank)
    batch = batch_of(requests, 64)
    batch.block_table_tensor, batch.dcp_local_seq_lens = own.block_table_tensor, own.seq_lens
    return batch, own


def served_on(
    rank: int, exchange: Exchange, setting: Setting, folder: Path, monkeypatch: pytest.MonkeyPatch, name: str = "CUTE_MLA", **options: Any
) -> Served:
    """Return a rank's layer: its own heads, and the settings of two ranks."""
    exchange.rank = rank

    def all_gather(part: Tensor, dim: int) -> Tensor:
        assert dim == 0
        assert torch.equal(part, SINKS[rank * HEADS :][:HEADS])
        return SINKS

    group = SimpleNamespace(world_size=RANKS, rank_in_group=rank, all_gather=all_gather)
    monkeypatch.setattr(parallel_state, "get_dcp_world_size_and_rank", lambda *_: (RANKS, rank))
    for module in (mla_attention, sparse_mla_attention, dense, sparse):
        monkeypatch.setattr(module, "get_dcp_group", lambda: group)
    bound = type("Bound", (Manager,), {"__init__": lambda self, **_: Manager.__init__(self, exchange)})
    for module in (mla_attention, sparse_mla_attention):
        monkeypatch.setattr(module, "MLADCPManager", bound)
    return serve(setting, folder, name, **options)


def stored(served: Served, own: CommonAttentionMetadata, kv: Sequence[tuple[Tensor, Tensor]], rank: int) -> Tensor:
    """Return a rank's cache: its keys, NaN elsewhere."""
    cache = torch.full((int(own.block_table_tensor.max()) + 1, 64, LATENT + ROPE), torch.nan, dtype=torch.bfloat16)
    quantised = served.setting.cache == "fp8"
    cache = cache.to(torch.float8_e4m3fn) if quantised else cache
    for request, parts in enumerate(kv):
        blocks, rows = rows_of(own, request, 64)
        keys = torch.cat(parts, dim=1)
        cache[blocks, rows] = keys[positions(len(keys), rank, served.setting.interleave)].to(cache.dtype)
    return cache.view(torch.uint8) if quantised else cache


@pytest.fixture(autouse=True)
def _gathering(monkeypatch: pytest.MonkeyPatch) -> None:
    def gather(src_cache: Tensor, dst: Tensor, *, block_table: Tensor, cu_seq_lens: Tensor, batch_size: int, seq_starts: Tensor) -> None:
        """Torch for vLLM's op that gathers keys of a 16-bit cache. Rows of padding may be past a request's keys."""
        owners = torch.repeat_interleave(torch.arange(batch_size), cu_seq_lens.diff().long())
        options = {"token_to_seq": owners, "cu_seq_lens": cu_seq_lens, "seq_starts": seq_starts, "scale": torch.ones(())}
        gather_keys(src_cache, dst, block_table=block_table, num_tokens=len(dst), **options)

    monkeypatch.setattr(vllm._custom_ops, "cp_gather_cache", gather)


def outputs(
    arch: Arch, setting: Setting, requests: list[Request], longest: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[list[tuple[Tensor, Tensor]], list[list[str]], Any]:
    """Return the layer's output and the wanted one of each rank, the ops of each rank, and the metadata of the last.

    longest: query tokens of a request up to which vLLM decodes it.
    """
    exchange, parts = Exchange(), []
    generator = torch.Generator().manual_seed(6)
    for rank in range(RANKS):
        batch, own = batch_on(requests, rank, setting.interleave)
        served = served_on(rank, exchange, setting, folder, monkeypatch)
        served.builder.reorder_batch_threshold = longest
        q = torch.randn(batch.num_actual_tokens, HEADS, 192, generator=generator).to(torch.bfloat16)
        kv = keys_of(batch, served.setting)
        parts.append((served, batch, q, kv, stored(served, own, kv, rank)))
    for _ in range(3):
        exchange.begin()
        outs, ops = [], []
        for exchange.rank, (served, batch, q, kv, storage) in enumerate(parts):
            monkeypatch.setattr(dense, "get_dcp_group", lambda: SimpleNamespace(rank_in_group=exchange.rank))
            new = [tuple(part[len(part) - request.tokens :] for part in both) for request, both in zip(requests, kv, strict=True)]
            latent, rotary = (torch.cat(part) for part in zip(*new, strict=True))
            out = torch.full((len(q), HEADS * 128), torch.nan, dtype=torch.bfloat16)
            with launched_ops(arch) as launched, set_current_vllm_config(served.config), torch.inference_mode():
                metadata = served.builder.build(0, batch)
                served.layer.forward_impl(q, latent, rotary.unsqueeze(1), storage, metadata, output=out)
            outs.append(out)
            ops.append(launched)
    wanted = [layer_output(served, batch, q, kv) for served, batch, q, kv, _ in parts]
    return list(zip(outs, wanted, strict=True)), ops, metadata


@pytest.mark.parametrize("cache", ["auto", "fp8"])
def test_decode_and_prefill_with_context(arch: Arch, cache: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    setting = Setting(HEADS, cache=cache, ranks=RANKS)
    results, ops, metadata = outputs(arch, setting, REQUESTS, 1, tmp_path, monkeypatch)
    assert (metadata.num_decodes, metadata.num_prefills) == (2, 2)
    assert all(launched == ["split_plan", "dense_prefill", "dense_prefill", "dense_decode", "combine"] for launched in ops)
    for out, wanted in results:
        if cache == "auto":
            agree(out, wanted, 2e-2)
        else:
            assert torch.nn.functional.cosine_similarity(out.float().flatten(), wanted.flatten(), dim=0) > 0.995


@pytest.mark.parametrize("interleave", [1, 16])
def test_drafts_are_decoded(arch: Arch, interleave: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Different numbers of draft tokens: each token sees this rank's keys up to its own position."""
    requests = [Request(3, 301), Request(1, 2), Request(2, 65), Request(3, 3)]
    setting = Setting(HEADS, ranks=RANKS, interleave=interleave)
    results, ops, metadata = outputs(arch, setting, requests, 3, tmp_path, monkeypatch)
    assert (metadata.num_decodes, metadata.num_prefills) == (4, 0)
    assert all(launched == ["split_plan", "dense_decode", "combine"] for launched in ops)
    for out, wanted in results:
        agree(out, wanted, 2e-2)


def rank_of(
    rank: int, setting: Setting, requests: list[Request], folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, **options: Any
) -> tuple[Served, CommonAttentionMetadata, Tensor]:
    """Return the layer of a rank, its batch and its cache. Both ranks' heads attend to the keys of each."""
    served = served_on(rank, Exchange(), setting, folder, monkeypatch, name, **options)
    batch, own = batch_on(requests, rank, setting.interleave)
    return served, batch, stored(served, own, keys_of(batch, setting), rank)


def state_of(result: tuple[Tensor, Tensor | None]) -> tuple[Tensor, Tensor]:
    """Return out and lse, of which ranks have both."""
    out, lse = result
    assert lse is not None
    return out, lse


def of_both_ranks() -> Tensor:
    """Return the queries of tokens, by the heads of both ranks."""
    return torch.randn(6, RANKS * HEADS, LATENT + ROPE, generator=torch.Generator().manual_seed(4)).bfloat16()


def over(q: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    """Return out [heads, 512] and lse [heads] of a token."""
    found, lse = attention(
        q.float()[:, None], keys[None], keys[None, :, :LATENT], SCALE, torch.ones(1, len(keys), dtype=torch.bool), -math.inf
    )
    return found[:, 0], lse[:, 0]


DRAFTS = [Request(3, 301), Request(1, 2), Request(2, 129)]


@pytest.mark.parametrize("interleave", [1, 16, 64])
def test_drafts_by_indices_and_sinks_once(arch: Arch, interleave: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Sparse attention with different numbers of drafts: decoded by any interleave. The parts of the ranks merge to the whole."""
    setting = Setting(HEADS, topk=64, ranks=RANKS, interleave=interleave)
    q, parts = of_both_ranks(), []
    chosen, draw = torch.full((6, 64), -1, dtype=torch.int32), torch.Generator().manual_seed(8)
    owners = [(request, request.keys - request.tokens + i + 1) for request in DRAFTS for i in range(request.tokens)]
    for row, (_, seen) in zip(chosen, owners, strict=True):
        row[: min(seen, 64)] = torch.randperm(seen, generator=draw)[:64].to(torch.int32)
    chosen[3:5] = torch.where(chosen[3:5] // interleave % RANKS == 0, chosen[3:5], -1)  # none of the second rank's
    for rank in range(RANKS):
        sinks = SINKS[rank * HEADS :][:HEADS].clone()
        served, batch, cache = rank_of(rank, setting, DRAFTS, tmp_path, monkeypatch, "CUTE_MLA_SPARSE", sinks=sinks)
        served.config.speculative_config = SimpleNamespace(num_speculative_tokens=2, parallel_drafting=False)
        builder = type(served.builder)(served.builder.kv_cache_spec, [LAYER], served.config, torch.device("cpu"))
        assert builder.reorder_batch_threshold == 3
        served.layer.impl.topk_indices_buffer[:6] = chosen
        with launched_ops(arch) as ops, set_current_vllm_config(served.config):
            metadata = builder.build(0, batch)
            assert (metadata.num_decodes, metadata.num_decode_tokens) == (3, 6)
            parts.append(state_of(served.mqa(q, cache, metadata)))
        assert ops == ["split_plan", "sparse_decode", "combine"]
    out = merged(parts)
    kv = keys_of(batch, setting)
    for token, (request, _) in enumerate(owners):
        keys = torch.cat(kv[DRAFTS.index(request)], dim=1).float()[chosen[token][chosen[token] >= 0].long()]
        wanted, lse = over(q[token], keys)
        agree(out[token], wanted * torch.sigmoid(lse - SINKS)[:, None], 1e-2)


@pytest.mark.parametrize("interleave", [1, 16])
def test_blocks_of_drafts_see_each_other(arch: Arch, interleave: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Every token of a block sees all of this rank's keys."""
    setting, requests = Setting(HEADS, ranks=RANKS, interleave=interleave), [Request(3, 301), Request(3, 3)]
    q, parts = of_both_ranks(), []
    for rank in range(RANKS):
        served, batch, cache = rank_of(rank, setting, requests, tmp_path, monkeypatch, "CUTE_MLA", non_causal_multi_token_decode=True)
        batch.causal = False
        with launched_ops(arch):
            parts.append(state_of(served.mqa(q, cache, served.build(batch))))
    out, kv = merged(parts), keys_of(batch, setting)
    for token in range(6):
        agree(out[token], over(q[token], torch.cat(kv[token // 3], dim=1).float())[0], 1e-2)


def test_graphs_find_the_tokens_in_place(arch: Arch, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Tokens that pad a batch see no keys."""
    served = served_on(1, Exchange(), Setting(HEADS, ranks=RANKS), tmp_path, monkeypatch)
    served.builder.reorder_batch_threshold = 3
    monkeypatch.setattr(dense, "get_dcp_group", lambda: SimpleNamespace(rank_in_group=1))
    places = set()
    with launched_ops(arch):
        for requests, lengths in (
            ([Request(3, 60), Request(3, 9)], [29, 29, 30, 3, 4, 4]),
            ([Request(2, 90), Request(0, 0)], [44, 45, 0, 0, 0, 0]),
        ):
            batch = batch_of(requests, 64, padded_tokens=6)
            batch.max_query_len = 3
            batch.block_table_tensor = torch.nn.functional.pad(batch.block_table_tensor, (0, 8 - batch.block_table_tensor.shape[1]))
            batch.dcp_local_seq_lens = batch.seq_lens // 2
            decode = served.build(batch).decode
            assert decode.lengths.tolist() == lengths
            assert decode.query_start_loc.tolist() == list(range(7))
            assert torch.equal(decode.seq_lens, batch.dcp_local_seq_lens)  # vLLM masks the shards of requests by these
            places.add(tuple(part.data_ptr() for part in (decode.tables, decode.lengths, decode.query_start_loc, *decode.plan)))
    assert len(places) == 1
