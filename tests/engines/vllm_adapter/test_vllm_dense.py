"""Dense decode through vLLM's layer and builder, on the simulated device, against attention in fp32."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import vllm.envs as envs
from torch import Tensor
from vllm.v1.attention.backend import CommonAttentionMetadata

import cute_mla
from cute_mla.engines.vllm import dense
from cute_mla.reference import attention, visible_keys
from cute_mla.spec.arch import Arch
from tests.engines.vllm_adapter.vllm_parts import (
    LATENT,
    ROPE,
    SCALE,
    Request,
    Served,
    Setting,
    agree,
    batch_of,
    empty_cache,
    merged,
    query_rows,
    rows_of,
    serve,
)

E4M3 = torch.float8_e4m3fn
LSE = 2e-4
FEW_SMS = 6


def filled_cache(batch: CommonAttentionMetadata, setting: Setting) -> Tensor:
    """Return the cache that vLLM gives forward_mqa: keys of every request, NaN elsewhere."""
    generator = torch.Generator().manual_seed(3)
    cache = empty_cache(batch, setting)
    if setting.cache != "auto":
        cache = cache.view(E4M3)
    for request in range(batch.num_reqs):
        blocks, rows = rows_of(batch, request, setting.block_size)
        cache[blocks, rows] = torch.randn(len(rows), LATENT + ROPE, generator=generator).to(cache.dtype)
    return cache


def queries(tokens: int, heads: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(tokens, heads, LATENT + ROPE, generator=torch.Generator().manual_seed(4)).to(dtype)


def expected(batch: CommonAttentionMetadata, q: Tensor, cache: Tensor, scales: tuple[float, float] = (1, 1)) -> tuple[Tensor, Tensor]:
    """Out [tokens, heads, 512] and lse [tokens, heads]; 0 and -inf where there are no keys."""
    out, lse = torch.zeros(*q.shape[:2], LATENT), torch.full(q.shape[:2], -math.inf)
    for request in range(batch.num_reqs):
        own = query_rows(batch, request)
        blocks, rows = rows_of(batch, request, cache.shape[1])
        keys = cache[blocks, rows].float()[None] * scales[1]
        mine = q[own].float().transpose(0, 1) * scales[0]
        visible = visible_keys(mine.shape[1], keys.shape[1], True, q.device)
        found, norm = attention(mine, keys, keys[..., :LATENT], SCALE, visible, -math.inf)
        out[own], lse[own] = found.transpose(0, 1), norm.T
    return out, lse


def check(served: Served, requests: Sequence[Request], q: Any, **options: Any) -> None:
    """Decode a batch and compare."""
    batch = batch_of(requests, served.setting.block_size)
    cache = filled_cache(batch, served.setting)
    metadata = served.build(batch)
    assert (metadata.num_decodes, metadata.num_prefills) == (len(requests), 0)
    out, _ = served.mqa(q, cache, metadata)
    whole = torch.cat(q, dim=-1) if isinstance(q, tuple) else q
    wanted, _ = expected(batch, whole, cache, **options)
    assert out.dtype == served.setting.dtype
    agree(out, wanted)


@pytest.fixture
def on_device(arch: Arch) -> Any:
    with cute_mla.simulate(arch, FEW_SMS) as device:
        yield device


BATCHES: dict[str, list[Request]] = {
    "one": [Request(1, 65)],
    "lengths": [Request(1, 1), Request(1, 200), Request(1, 64), Request(1, 100)],
    "split": [Request(1, 900), Request(1, 30)],
}


@pytest.mark.usefixtures("on_device")
@pytest.mark.parametrize("requests", BATCHES.values(), ids=BATCHES)
def test_decode(requests: list[Request], tmp_path: Path) -> None:
    served = serve(Setting(16), tmp_path)
    q = queries(len(requests), 16, torch.bfloat16)
    check(served, requests, (q[..., :LATENT].contiguous(), q[..., LATENT:].contiguous()))


@pytest.mark.usefixtures("on_device")
@pytest.mark.parametrize("heads", [128, 8, 5])
def test_heads_of_a_rank(heads: int, tmp_path: Path) -> None:
    check(serve(Setting(heads), tmp_path), [Request(1, 70), Request(1, 20)], queries(2, heads, torch.bfloat16))


@pytest.mark.usefixtures("on_device")
@pytest.mark.parametrize("block_size", [16, 32, 128])
def test_block_sizes(block_size: int, tmp_path: Path) -> None:
    check(
        serve(Setting(16, torch.float16, block_size=block_size), tmp_path), [Request(1, 150), Request(1, 20)], queries(2, 16, torch.float16)
    )


@pytest.mark.usefixtures("on_device")
@pytest.mark.parametrize("tokens", [2, 4])
def test_speculative_tokens(tokens: int, tmp_path: Path) -> None:
    served = serve(Setting(16), tmp_path)
    served.builder.reorder_batch_threshold = 4  # what vLLM sets with three speculative tokens
    check(served, [Request(tokens, 70), Request(tokens, tokens), Request(tokens, 129)], queries(3 * tokens, 16, torch.bfloat16))


@pytest.mark.usefixtures("on_device")
@pytest.mark.parametrize("cache", ["auto", "fp8"])
def test_blocks_of_drafts_see_each_other(cache: str, tmp_path: Path) -> None:
    """DSpark's drafts over Kimi K3, which has 96 heads: every token of a block sees all keys. A request of padding has none."""
    served = serve(Setting(96, cache=cache), tmp_path, non_causal_multi_token_decode=True)
    batch = batch_of([Request(3, 70), Request(3, 3), Request(0, 0)], 64, padded_tokens=9)
    batch.causal = False
    filled = filled_cache(batch, served.setting)
    q = queries(9, 96, torch.bfloat16)
    metadata = served.build(batch)
    assert (metadata.num_decodes, metadata.causal) == (3, False)
    out, _ = served.mqa(q, filled, metadata)
    for own, request in ((slice(0, 3), 0), (slice(3, 6), 1)):
        keys = filled[tuple(rows_of(batch, request, 64))].float()[None]
        wanted, _ = attention(
            q[own].float().transpose(0, 1), keys, keys[..., :LATENT], SCALE, torch.ones(3, keys.shape[1], dtype=torch.bool)
        )
        agree(out[own], wanted.transpose(0, 1))
    assert (out[6:] == 0).all()
    batch.causal = True  # the target's batches are as ever
    served.builder.reorder_batch_threshold = 3
    out, _ = served.mqa(q, filled, served.build(batch))
    agree(out, expected(batch, q, filled)[0])


@pytest.mark.usefixtures("on_device")
@pytest.mark.parametrize("quantised", [True, False], ids=["e4m3 queries", "bf16 queries"])
def test_fp8_cache_with_scales(quantised: bool, tmp_path: Path) -> None:
    served = serve(Setting(16, cache="fp8"), tmp_path)
    assert served.layer.impl.supports_quant_query_input
    served.layer._q_scale.fill_(0.5)
    served.layer._k_scale.fill_(0.25)
    requests = [Request(1, 70), Request(1, 20)]
    q = queries(2, 16, E4M3 if quantised else torch.bfloat16)
    batch = batch_of(requests, 64)
    cache = filled_cache(batch, served.setting)
    out, _ = served.mqa(q, cache, served.build(batch))
    wanted, _ = expected(batch, q, cache, (0.5 if quantised else 1.0, 0.25))
    assert out.dtype == torch.bfloat16
    assert torch.nn.functional.cosine_similarity(out.float().flatten(), wanted.flatten(), dim=0) > 0.999
    agree(out, wanted, 0.03 if quantised else 5e-3)


@pytest.mark.usefixtures("on_device")
def test_padded_requests_are_finite_and_leave_the_others_alone(tmp_path: Path) -> None:
    served = serve(Setting(16), tmp_path)
    q = queries(4, 16, torch.bfloat16)
    real = [Request(1, 70), Request(1, 130)]
    batch = batch_of([*real, Request(0, 0), Request(0, 0)], 64, padded_tokens=4)
    cache = filled_cache(batch, served.setting)
    metadata = served.build(batch)
    assert metadata.num_decodes == 4
    out, _ = served.mqa(q, cache, metadata)
    wanted, _ = expected(batch_of(real, 64), q[:2], cache)
    agree(out[:2], wanted)
    assert (out[2:] == 0).all()


@pytest.mark.usefixtures("on_device")
def test_lse_is_what_ranks_of_context_parallelism_merge_by(tmp_path: Path) -> None:
    served = serve(Setting(16), tmp_path)
    served.layer.impl.need_to_return_lse_for_decode = True  # as with decode_context_parallel_size > 1
    q = queries(2, 16, torch.bfloat16)
    parts, keys = [], []
    for rank, lengths in enumerate(((100, 1), (99, 0))):
        batch = batch_of([Request(1, length) for length in lengths], 64, seed=rank)
        cache = filled_cache(batch, served.setting)
        out, lse = served.mqa(q, cache, served.build(batch))
        wanted, norm = expected(batch, q, cache)
        assert lse is not None
        assert lse.shape == (2, 16)
        assert torch.equal(lse.isinf(), norm.isinf())
        assert (lse - norm)[norm.isfinite()].abs().max() < LSE
        agree(out, wanted)
        parts.append((out, lse))
        keys.append([cache[tuple(rows_of(batch, request, 64))] for request in range(2)])
    assert (parts[1][1][1] == -math.inf).all()
    for request, own in enumerate(zip(*keys, strict=True)):
        together = torch.cat(own).float()[None]
        visible = torch.ones(1, together.shape[1], dtype=torch.bool)
        wanted, _ = attention(q[request, :, None].float(), together, together[..., :LATENT], SCALE, visible)
        agree(merged(parts)[request], wanted[:, 0])


@pytest.mark.usefixtures("on_device")
def test_lse_of_several_tokens_a_request(tmp_path: Path) -> None:
    served = serve(Setting(5), tmp_path)
    served.builder.reorder_batch_threshold = 2
    served.layer.impl.need_to_return_lse_for_decode = True
    q = queries(4, 5, torch.bfloat16)
    batch = batch_of([Request(2, 70), Request(2, 9)], 64)
    cache = filled_cache(batch, served.setting)
    _, lse = served.mqa(q, cache, served.build(batch))
    _, norm = expected(batch, q, cache)
    assert lse is not None
    assert (lse - norm).abs().max() < LSE


@pytest.mark.usefixtures("on_device")
def test_plans_stay_where_they_are(tmp_path: Path) -> None:
    served = serve(Setting(16), tmp_path)
    long = batch_of([Request(1, 500), Request(1, 80), Request(1, 3)], 64)
    short = batch_of([Request(1, 20), Request(1, 900)], 64)
    first, splits = served.build(long).decode.plan
    kept = first.clone()
    second, other_splits = served.build(short).decode.plan
    assert (first.data_ptr(), splits.data_ptr()) == (second.data_ptr(), other_splits.data_ptr())
    fresh, fresh_splits = cute_mla.get_mla_metadata(short.seq_lens, 16, 1, 16, cu_seqlens_q=short.query_start_loc, total_q=2)
    assert torch.equal(second, fresh)
    assert torch.equal(other_splits, fresh_splits)
    assert not torch.equal(second, kept)


class Spy:
    """Calls through, and remembers the arguments."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.arguments: list[Any] = []
        self.options: dict[str, Any] = {}

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        self.arguments, self.options = list(arguments), options
        return self.function(*arguments, **options)


@pytest.fixture
def spy(monkeypatch: pytest.MonkeyPatch) -> Spy:
    found = Spy(dense.flash_mla_with_kvcache)
    monkeypatch.setattr(dense, "flash_mla_with_kvcache", found)
    return found


@pytest.mark.usefixtures("on_device")
@pytest.mark.parametrize("invariant", [True, False])
def test_vllms_switch_asks_for_batch_invariance(invariant: bool, spy: Spy, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(envs, "VLLM_BATCH_INVARIANT", invariant, raising=False)
    check(serve(Setting(16), tmp_path), [Request(1, 70)], queries(1, 16, torch.bfloat16))
    assert spy.options["batch_invariant"] is invariant


@pytest.mark.usefixtures("on_device")
def test_queries_in_one_tensor_are_not_copied(spy: Spy, tmp_path: Path) -> None:
    q = queries(2, 16, torch.bfloat16)
    check(serve(Setting(16), tmp_path), [Request(1, 70), Request(1, 20)], q)
    assert spy.arguments[0].data_ptr() == q.data_ptr()


@pytest.mark.usefixtures("on_device")
def test_queries_apart_meet_in_the_same_place(spy: Spy, tmp_path: Path) -> None:
    served = serve(Setting(16), tmp_path)
    q = queries(2, 16, torch.bfloat16)
    places = set()
    for _ in range(2):
        check(served, [Request(1, 70), Request(1, 20)], (q[..., :LATENT], q[..., LATENT:]))
        places.add(spy.arguments[0].data_ptr())
    assert len(places) == 1


RAGGED: dict[str, list[Request]] = {
    "lengths of query": [Request(1, 70), Request(3, 66), Request(4, 4), Request(2, 129)],
    "padding": [Request(4, 90), Request(1, 20), Request(0, 0), Request(0, 0)],
}


@pytest.mark.usefixtures("on_device")
@pytest.mark.parametrize("heads", [16, 128, 5])
@pytest.mark.parametrize("requests", RAGGED.values(), ids=RAGGED)
def test_requests_of_different_lengths_of_query(requests: list[Request], heads: int, tmp_path: Path) -> None:
    served = serve(Setting(heads), tmp_path)
    served.builder.reorder_batch_threshold = 4
    check(served, requests, queries(sum(request.tokens for request in requests), heads, torch.bfloat16))


@pytest.mark.usefixtures("on_device")
def test_the_device_trims_the_drafts_that_the_host_counts(tmp_path: Path) -> None:
    """Adaptive verification: query_start_loc on the device has fewer tokens than the host's; the rest is padding."""
    served = serve(Setting(16), tmp_path)
    served.builder.reorder_batch_threshold = 4
    real = [Request(1, 70), Request(4, 130), Request(2, 9)]
    batch = batch_of(real, 64, padded_tokens=9)
    batch.query_start_loc_cpu = torch.tensor([0, 3, 6, 9], dtype=torch.int32)
    batch.max_query_len = 4
    cache = filled_cache(batch, served.setting)
    q = queries(9, 16, torch.bfloat16)
    q[7:] = math.nan
    out, _ = served.mqa(q, cache, served.build(batch))
    wanted, _ = expected(batch_of(real, 64), q[:7], cache)
    agree(out[:7], wanted)
    assert (out[7:] == 0).all()


@pytest.mark.usefixtures("on_device")
def test_a_batch_of_other_lengths_finds_the_plan_of_its_graph_in_place(tmp_path: Path) -> None:
    """A graph for 3 requests with 6 tokens, at most 4 each, is captured with 2 tokens each and replayed with others."""
    served = serve(Setting(16), tmp_path)
    served.builder.reorder_batch_threshold = 4
    places = set()
    for tokens in ((2, 2, 2), (1, 4, 1), (0, 2, 4)):
        batch = batch_of([Request(count, 70 * count) for count in tokens], 64)
        batch.max_query_len = 4
        decode = served.build(batch).decode
        assert decode.max_query_len == 4
        places.add(tuple((part.data_ptr(), part.shape) for part in decode.plan))
        fresh = cute_mla.get_mla_metadata(batch.seq_lens, 4 * 16, 1, 16, cu_seqlens_q=batch.query_start_loc, total_q=6)
        assert all(torch.equal(part, wanted) for part, wanted in zip(decode.plan, fresh, strict=True))
    assert len(places) == 1


@pytest.mark.parametrize(
    ("option", "value"), [("alibi_slopes", [1.0]), ("sliding_window", 128), ("logits_soft_cap", 30.0), ("attn_type", "encoder")]
)
def test_layers_with_more_than_kernels_have_are_refused(option: str, value: Any) -> None:
    with pytest.raises(NotImplementedError, match=option):
        dense.CuteMlaImpl(16, 576, SCALE, 1, **{option: value})


@pytest.mark.usefixtures("on_device")
def test_the_memory_profiler_sees_partial_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    served = serve(Setting(16), tmp_path)
    sizes = []
    monkeypatch.setattr(dense.torch, "empty", lambda size, **_: sizes.append(size))
    from vllm.config import set_current_vllm_config

    with set_current_vllm_config(served.config):
        served.layer.impl.reserve_workspace()
    assert sizes == [cute_mla.workspace_size("dense_decode", batch=8, s_q=1, h_q=16, total_q=8, device="cpu")]
