"""The SGLang adapter against the recorded interface of SGLang, which itself does not import without CUDA's libraries.

The stand-ins have what the record has, and nothing else: an adapter that asks for more fails here.
"""

from __future__ import annotations

import ast
import inspect
import math
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import cute_mla
from cute_mla.engines import sglang as adapter
from cute_mla.reference import attention, visible_keys
from cute_mla.spec.arch import SM120, Arch
from cute_mla.testing.compare import same_bits
from tests.engines.sglang_interface import LATER
from tests.engines.sglang_parts import HEADS, INTERFACES, MODULES, SCALE, Recorded, members, mha_layer, plain
from tests.support.launched import launched_ops

SOURCES = sorted(Path(adapter.__file__).parent.glob("*.py"))
PAGE, CONTEXT = 64, 512
E4M3 = torch.float8_e4m3fn
LATENT = {576: 512, 512: 512, 320: 256}  # of the columns of a key: DeepSeek-V3, no rotary columns, Mistral Small 4


def layout_of(counts: list[int], padded_to: int = 0) -> Any:
    """Return a layout of so many draft tokens each; padded_to_bucket appends requests of one token."""

    def pad(*, padded_bs: int, cap: int) -> Any:
        assert (padded_bs, cap >= max(counts)) == (padded_to, True)
        return layout_of([*counts, *[1] * (padded_bs - len(counts))])

    return Recorded(
        members("speculative.ragged_verify", "RaggedVerifyLayout"),
        bs=len(counts),
        verify_lens=torch.tensor(counts, dtype=torch.int32),
        qo_indptr_device=torch.tensor([0, *counts]).cumsum(0),
        padded_to_bucket=pad,
    )


class Pool:
    """A pool of latent keys: slots of so many columns, one KV head. Keys are saved as they are, rounded to the pool's type."""

    def __init__(self, slots: int, dtype: torch.dtype, columns: int) -> None:
        self.buffer = torch.randn(slots, 1, columns, generator=torch.Generator().manual_seed(2)).to(dtype)

    def get_key_buffer(self, layer_id: int) -> Tensor:
        return self.buffer

    def set_kv_buffer(self, layer: Any, loc_info: Any, cache_k: Tensor, cache_v: Tensor) -> None:
        assert torch.equal(cache_v, cache_k[..., : LATENT[cache_k.shape[-1]]])
        self.buffer[loc_info.out_cache_loc] = cache_k.to(self.buffer.dtype)


def runner_with(dtype: torch.dtype, page_size: int = PAGE, columns: int = 576) -> Any:
    """Return a model runner with 4 request slots, whose pages are in random order."""
    pages = torch.randperm(4 * CONTEXT // page_size, generator=torch.Generator().manual_seed(1)).view(4, -1)
    slots = (pages[..., None] * page_size + torch.arange(page_size)).flatten(1).to(torch.int32)
    return Recorded(
        members("model_executor.model_runner", "ModelRunner"),
        page_size=page_size,
        device="cpu",
        kv_cache_dtype=dtype,
        req_to_token_pool=Recorded(members("mem_cache.memory_pool", "ReqToTokenPool"), req_to_token=slots),
        token_to_kv_pool=Pool(slots.numel(), dtype, columns),
        model_config=Recorded(
            members("configs.model_config", "ModelConfig"), num_attention_heads=8 * HEADS, context_len=CONTEXT, hf_config=None
        ),
    )


def layer_of(columns: int = 576) -> Any:
    known = members("layers.radix_attention", "RadixAttention")
    return Recorded(known, tp_q_head_num=HEADS, head_dim=columns, scaling=SCALE, layer_id=0)


def mode(name: str) -> Any:
    questions = {"is_decode_or_idle": "decode", "is_target_verify": "verify", "is_extend_without_speculative": "extend"}
    answers = {question: name == kind for question, kind in questions.items()}
    assert answers.keys() <= members("model_executor.forward_batch_info", "ForwardMode").keys()
    return SimpleNamespace(**{question: lambda answer=answer: answer for question, answer in answers.items()})


def batch_of(lengths: list[int], requests: list[int], kind: str = "decode", **more: Any) -> Any:
    mixin = members("model_executor.forward_batch_deepseek_mha_mixin", "ForwardBatchDeepSeekMHAMixin")
    return Recorded(
        {**members("model_executor.forward_batch_info", "ForwardBatch"), **mixin},
        **more,
        forward_mode=mode(kind),
        batch_size=len(lengths),
        seq_lens=torch.tensor(lengths),
        req_pool_indices=torch.tensor(requests),
    )


def expected(
    runner: Any, q: Sequence[Tensor] | Tensor, lengths: list[int], requests: list[int], masks: Sequence[Tensor] | None = None
) -> Tensor:
    """[all tokens, heads * latent columns], of q [tokens, heads, columns] of each request over lengths keys. masks: of the last keys."""
    out = []
    for i, (mine, length, request) in enumerate(zip(q, lengths, requests, strict=True)):
        slots = runner.req_to_token_pool.req_to_token[request, :length].long()
        keys = runner.token_to_kv_pool.buffer[slots, 0].float()[None]
        visible = visible_keys(len(mine), length, True, mine.device)
        if masks is not None:
            visible[:, length - len(mine) :] = masks[i]
        out.append(attention(mine.float().transpose(0, 1), keys, keys[..., : LATENT[keys.shape[-1]]], SCALE, visible)[0].transpose(0, 1))
    return torch.cat(out).flatten(1)


def queries(batch: int, tokens: int, columns: int = 576) -> Tensor:
    return torch.randn(batch, tokens, HEADS, columns, generator=torch.Generator().manual_seed(3)).bfloat16()


def agree(out: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(out.float(), wanted, rtol=1e-2, atol=5e-3)


def test_everything_that_the_adapter_imports_is_recorded() -> None:
    for source in SOURCES:
        for node in ast.walk(ast.parse(source.read_text())):
            if isinstance(node, ast.ImportFrom) and node.level == 0 and (node.module or "").startswith("sglang"):
                assert {alias.name for alias in node.names} <= MODULES[str(node.module)].keys()
            assert not (isinstance(node, ast.Import) and any(alias.name.startswith("sglang") for alias in node.names))


@pytest.mark.usefixtures("engine")
def test_what_sglang_calls_takes_what_sglang_gives() -> None:
    from cute_mla.engines.sglang.dense import CuteMla

    recorded = members("layers.attention.base_attn_backend", "AttentionBackend")
    ours = {name for name in vars(CuteMla) if not name.startswith("_")} | {"data_type"}
    assert ours <= recorded.keys()
    for name in ours:
        if inspect.isfunction(getattr(CuteMla, name, None)):
            marks: dict[Any, str] = {inspect.Parameter.VAR_KEYWORD: "**", inspect.Parameter.VAR_POSITIONAL: "*"}
            given = [marks.get(p.kind, "") + p.name for p in inspect.signature(getattr(CuteMla, name)).parameters.values()]
            assert given == recorded[name], name
    assert recorded.keys() - ours == {"forward_metadata"}


def test_registration(engine: SimpleNamespace) -> None:
    adapter.register()
    adapter.register()
    assert len(engine.listed) == 4
    assert all(names == ["triton", "cute_mla"] for names in engine.listed.values())
    backend = engine.factories["cute_mla"](runner_with(torch.bfloat16))
    assert type(backend).__name__ == "CuteMla"
    assert backend.needs_cpu_seq_lens is False
    assert engine.handlers == {"cute_mla": "as trtllm_mla"}
    assert engine.split_queries == ["dsa"]


def test_versions_whose_interface_is_the_same() -> None:
    older, newest = INTERFACES
    assert (older["version"], newest["version"]) == ("0.5.22", "0.5.23")
    assert newest["modules"].keys() - older["modules"].keys() == LATER  # for DeepSeek-V4 alone
    modules = {**older["modules"], **{name: newest["modules"][name] for name in LATER}}
    assert {**older, "version": None, "modules": modules} == {**newest, "version": None}


@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize(
    ("dtype", "page_size", "columns"),
    [(torch.bfloat16, 64, 576), (torch.bfloat16, 16, 576), (E4M3, 64, 576), (torch.bfloat16, 64, 512), (torch.bfloat16, 64, 320)],
    ids=str,
)
def test_decode(arch: Arch, dtype: torch.dtype, page_size: int, columns: int) -> None:
    from cute_mla.engines.sglang.dense import CuteMla

    runner, lengths, requests = runner_with(dtype, page_size, columns), [70, 1, 200], [2, 0, 3]
    backend, batch, q = CuteMla(runner), batch_of(lengths, requests), queries(3, 1, columns)
    k = torch.randn(3, 1, columns, generator=torch.Generator().manual_seed(9)).bfloat16()
    table = runner.req_to_token_pool.req_to_token
    batch.out_cache_loc = torch.stack([table[request, length - 1] for request, length in zip(requests, lengths, strict=True)]).long()
    with cute_mla.simulate(arch, 6):
        backend.init_forward_metadata(batch)
        out = backend.forward_decode(q.flatten(1), k, k[..., : LATENT[columns]], layer_of(columns), batch)
    assert torch.equal(runner.token_to_kv_pool.buffer[batch.out_cache_loc].float(), k.to(dtype).float())
    agree(out, expected(runner, q, lengths, requests))


@pytest.mark.usefixtures("engine")
def test_verification_of_draft_tokens(arch: Arch) -> None:
    from cute_mla.engines.sglang.dense import CuteMla

    runner, requests = runner_with(torch.bfloat16), [1, 3]
    backend, batch, q = CuteMla(runner), batch_of([61, 5], requests, "verify"), queries(2, 3)
    with cute_mla.simulate(arch, 6):
        backend.init_forward_metadata(batch)
        out = backend.forward_extend(q.flatten(0, 1).flatten(1), None, None, layer_of(), batch)
    agree(out, expected(runner, q, [64, 8], requests))


@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize("padded", [False, True])
def test_drafts_of_different_lengths(arch: Arch, padded: bool) -> None:
    from cute_mla.engines.sglang.dense import CuteMla

    runner, requests, counts = runner_with(torch.bfloat16), [1, 3, 0], [3, 1, 2]
    backend, batch = CuteMla(runner), batch_of([61, 5, 128], requests, "verify")
    batch.layout, batch.positions = layout_of(counts), torch.zeros(8 if padded else 6)
    if padded:  # by a request of one token, and by a token of no request
        batch.layout = layout_of(counts, padded_to=4)
        batch.batch_size, batch.seq_lens, batch.req_pool_indices = 4, torch.tensor([61, 5, 128, 1]), torch.tensor([*requests, 0])
    q = queries(1, len(batch.positions))[0]
    q[7:] = torch.nan
    with cute_mla.simulate(arch, 6):
        backend.init_forward_metadata(batch)
        out = backend.forward_extend(q.flatten(1), None, None, layer_of(), batch)
    agree(out[:6], expected(runner, q[:6].split(counts), [64, 6, 130], requests))
    assert (out[7:] == 0).all()


def test_trees_of_draft_tokens(arch: Arch, engine: SimpleNamespace) -> None:
    from cute_mla.engines.sglang.dense import CuteMla

    engine.spec.speculative_eagle_topk, engine.spec.speculative_num_draft_tokens = 2, 5
    runner, requests = runner_with(torch.bfloat16), [1, 3]
    backend = CuteMla(runner)
    assert backend.verify_mask is not None
    assert not backend.verify_mask.buffer.numel()
    backend.init_cuda_graph_state(2, 10)
    mask = backend.verify_mask
    assert (mask.mode, mask.max_bs, mask.is_read, mask.buffer.dtype) == ("draft tokens alone", 2, True, torch.bool)
    parents = torch.tensor([[-1, 0, 0, 1, 2], [-1, 0, 1, 1, 0]])
    trees = mask.buffer.view(2, 5, 5)
    for tree, up in zip(trees, parents.tolist(), strict=True):
        for token in range(5):
            tree[token] = tree[up[token]] if token else False
            tree[token, token] = True
    batch, q = batch_of([61, 5], requests, "verify"), queries(2, 5)
    batch.spec_info = Recorded(members("speculative.eagle_info", "EagleVerifyInput"), custom_mask=mask.buffer)
    with cute_mla.simulate(arch, 6):
        backend.init_forward_metadata_out_graph(batch, in_capture=True)
        captured = backend.forward_metadata
        first = backend.forward_extend(q.flatten(0, 1).flatten(1), None, None, layer_of(), batch)
        wanted = expected(runner, q, [66, 10], requests, trees)
        agree(first, wanted)
        mask.buffer.copy_(trees.flip(0).flatten().clone())
        backend.init_forward_metadata_out_graph(batch)
        backend.forward_metadata = captured
        agree(
            backend.forward_extend(q.flatten(0, 1).flatten(1), None, None, layer_of(), batch),
            expected(runner, q, [66, 10], requests, trees),
        )


@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize(("columns", "values"), [(192, 128), (128, 128), (256, 256)])
def test_prefill_of_new_tokens_and_of_chunks_of_a_prefix(arch: Arch, columns: int, values: int) -> None:
    """By SGLang's calls: new tokens causally, then each chunk of the cached prefix, merged by lse. Padding is NaN."""
    from cute_mla.engines.sglang.dense import CuteMla

    runner, counts, prefix, heads = runner_with(torch.bfloat16), [5, 64, 1], [70, 0, 3], 2
    lengths = [count + cached for count, cached in zip(counts, prefix, strict=True)]
    draw = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(n, heads, d, generator=draw).bfloat16() for n, d in ((72, columns), (143, columns), (143, values)))
    q[70:] = torch.nan  # tokens of no request
    places = [torch.arange(end - n, end) for n, end in zip(lengths, torch.tensor(lengths).cumsum(0).tolist(), strict=True)]
    fresh = torch.cat([rows[cached:] for rows, cached in zip(places, prefix, strict=True)])
    chunk_ends = [[64, 0, 3], [6, 0, 0]]  # of the prefix of each request: two chunks
    extend = {"extend_seq_lens": torch.tensor(counts), "extend_seq_lens_cpu": counts, "positions": torch.zeros(72)}
    batch = batch_of(lengths, [1, 3, 0], "extend", **extend, attn_attend_prefix_cache=False, mha_return_lse=True)
    backend, layer = CuteMla(runner), mha_layer(columns, values, heads)
    with launched_ops(arch) as ops:
        backend.init_forward_metadata(batch)
        del ops[:]
        pad = torch.full((2, heads), torch.nan)
        new_k, new_v = (torch.cat((part[fresh], pad[:, :, None].expand(-1, -1, part.shape[2]).bfloat16())) for part in (k, v))
        states = [backend.forward_extend(q.flatten(1), new_k.flatten(1), new_v.flatten(1), layer, batch, save_kv_cache=False)]
        batch.attn_attend_prefix_cache = True
        batch.prefix_chunk_cu_seq_lens = torch.tensor([[0, *ends] for ends in chunk_ends]).cumsum(1).to(torch.int32)
        batch.prefix_chunk_max_seq_lens = [64, 6]
        done = [0, 0, 0]
        for batch.prefix_chunk_idx, ends in enumerate(chunk_ends):
            rows = torch.cat([own[start : start + n] for own, start, n in zip(places, done, ends, strict=True)])
            done = [start + n for start, n in zip(done, ends, strict=True)]
            states.append(backend.forward_extend(q.flatten(1), k[rows].flatten(1), v[rows].flatten(1), layer, batch, save_kv_cache=False))
    assert ops == 3 * ["dense_prefill"]
    lse = torch.stack([norm for _, norm in states])
    weights = (lse - lse.logsumexp(0)).exp().nan_to_num(0.0)
    out = sum(weight[..., None] * part.float() for weight, (part, _) in zip(weights, states, strict=True)).flatten(1)
    wanted = [plain(mine, k[rows], v[rows], cached) for mine, rows, cached in zip(q[:70].split(counts), places, prefix, strict=True)]
    torch.testing.assert_close(out[:70], torch.cat([part for part, _ in wanted]), rtol=1e-2, atol=1e-2)
    assert (lse.logsumexp(0)[:70] - torch.cat([norm for _, norm in wanted])).abs().max() < 2e-3
    assert (out[70:] == 0).all()
    assert lse[0].isfinite().all()  # of padding, too: SGLang's merge gives NaN where no part is finite
    assert (lse[1:, 5:69] == -math.inf).all()  # the second request has no prefix


@pytest.mark.usefixtures("engine")
def test_rtx_boards_run_each_phase() -> None:
    test_decode(SM120, E4M3, 64, 576)
    test_decode(SM120, torch.bfloat16, 64, 320)
    test_drafts_of_different_lengths(SM120, padded=True)
    test_prefill_of_new_tokens_and_of_chunks_of_a_prefix(SM120, 256, 256)


@pytest.mark.usefixtures("engine")
def test_prefill_without_a_prefix_returns_out_alone(arch: Arch) -> None:
    from cute_mla.engines.sglang.dense import CuteMla

    draw = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(9, HEADS, d, generator=draw).bfloat16() for d in (192, 192, 128))
    extend = {"extend_seq_lens": torch.tensor([2, 7]), "extend_seq_lens_cpu": [2, 7], "positions": torch.zeros(9)}
    batch = batch_of([2, 7], [1, 3], "extend", **extend, attn_attend_prefix_cache=None, mha_return_lse=False)
    backend = CuteMla(runner_with(torch.bfloat16))
    with launched_ops(arch):
        backend.init_forward_metadata(batch)
        out = backend.forward_extend(q.flatten(1), k.flatten(1), v.flatten(1), mha_layer(192, 128), batch, save_kv_cache=False)
    agree(out, torch.cat([plain(q[rows], k[rows], v[rows], 0)[0] for rows in (slice(0, 2), slice(2, 9))]))


@pytest.mark.usefixtures("engine")
def test_prefill_over_latent_keys(arch: Arch) -> None:
    """Absorbed projections, in captured prefill or without chunks of the prefix."""
    from cute_mla.engines.sglang.dense import CuteMla

    runner, counts, lengths, requests = runner_with(torch.bfloat16), [5, 1, 40], [75, 1, 40], [1, 3, 0]
    extend = {"extend_seq_lens": torch.tensor(counts), "extend_seq_lens_cpu": counts, "positions": torch.zeros(48)}
    batch, backend = batch_of(lengths, requests, "extend", **extend), CuteMla(runner)
    q = queries(1, 48)[0]
    q[46:] = torch.nan
    with launched_ops(arch) as ops:
        backend.init_forward_metadata(batch)
        out = backend.forward_extend(q.flatten(1), None, None, layer_of(), batch)
    assert ops == ["split_plan", "dense_decode", "combine"]
    agree(out[:46], expected(runner, q[:46].split(counts), lengths, requests))
    assert (out[46:] == 0).all()


@pytest.mark.usefixtures("engine")
def test_replays_find_their_metadata_where_it_was_captured(arch: Arch) -> None:
    from cute_mla.engines.sglang.dense import CuteMla

    runner = runner_with(torch.bfloat16)
    backend = CuteMla(runner)
    with pytest.raises(ValueError, match="init_cuda_graph_state has not been called"):
        backend.init_forward_metadata_out_graph(batch_of([1], [0]), in_capture=True)
    backend.init_cuda_graph_state(4, 4)
    with cute_mla.simulate(arch, 6):
        backend.init_forward_metadata_out_graph(batch_of([1, 1], [0, 0]), in_capture=True)
        captured = backend.forward_metadata
        backend.init_forward_metadata_out_graph(batch_of([100, 3], [2, 1]))
        replayed = backend.forward_metadata
        places = [[None if part is None else part.data_ptr() for part in metadata[:6]] for metadata in (captured, replayed)]
        assert places[0] == places[1]
        q = queries(2, 1)
        backend.forward_metadata = captured  # a graph holds the addresses that it saw
        out = backend.forward_decode(q.flatten(1), None, None, layer_of(), batch_of([100, 3], [2, 1]))
    agree(out, expected(runner, q, [100, 3], [2, 1]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, E4M3], ids=str)
def test_bits_of_deterministic_mode(arch: Arch, engine: SimpleNamespace, dtype: torch.dtype) -> None:
    """A token has the same bits in a prefill of all, behind cached tokens, among drafts and decoded, beside others and alone."""
    engine.deterministic = True
    adapter.register()
    runner, total, mine, other = runner_with(dtype), 200, 2, 0
    backend, q, layer = engine.factories["cute_mla"](runner), queries(1, 200)[0], layer_of()
    assert engine.handlers == {"cute_mla": "as triton"}

    def attended(first: int, last: int, kind: str, beside: int = 0) -> Tensor:
        """Attend with these of the tokens, the last ones of all; beside: tokens of a request before them."""
        counts, lengths, requests = [last - first], [last], [mine]
        if beside:
            counts, lengths, requests = [beside, *counts], [300, *lengths], [other, mine]
        extend = {"extend_seq_lens": torch.tensor(counts), "extend_seq_lens_cpu": counts} if kind == "extend" else {}
        cached = [length - count for length, count in zip(lengths, counts, strict=True)] if kind == "verify" else lengths
        batch = batch_of(cached, requests, kind, **extend, positions=torch.zeros(sum(counts)))
        backend.init_forward_metadata(batch)
        given = torch.cat((q[:beside], q[first:last])).flatten(1)
        return backend.forward_extend(given, None, None, layer, batch)[beside:]

    with cute_mla.simulate(arch, 6):
        whole = attended(0, total, "extend")
        assert same_bits(attended(0, 71, "extend"), whole[:71])
        assert same_bits(attended(71, total, "extend", beside=9), whole[71:])
        assert same_bits(attended(total - 3, total, "verify", beside=3), whole[-3:])
        assert same_bits(attended(total - 1, total, "decode"), whole[-1:])
        assert same_bits(attended(total - 1, total, "decode", beside=1), whole[-1:])
    agree(whole, expected(runner, q[None], [total], [mine]))


def test_what_is_refused(engine: SimpleNamespace) -> None:
    from cute_mla.engines.sglang.dense import CuteMla

    with pytest.raises(ValueError, match="--page-size: page size is 1; supported"):
        CuteMla(runner_with(torch.bfloat16, 1))
    backend = CuteMla(runner_with(torch.bfloat16))
    with pytest.raises(NotImplementedError, match="supported: prefill, decode and verification, of target models"):
        backend.init_forward_metadata(batch_of([3], [0], "draft extend"))
    with pytest.raises(NotImplementedError, match="topk_indices given"):
        backend.forward_decode(queries(1, 1).flatten(1), None, None, layer_of(), batch_of([3], [0]), topk_indices=torch.zeros(1))
    refused = CuteMla(runner_with(torch.bfloat16, columns=288))
    with cute_mla.simulate("sm90", 6):
        refused.init_forward_metadata(batch_of([3], [0]))
        with pytest.raises(ValueError, match=r"q .*; supported without indices on sm90: \[batch, s_q, h_q, 576 or 512 or 320 or 1088\]"):
            refused.forward_decode(queries(1, 1, 288).flatten(1), None, None, layer_of(288), batch_of([3], [0]))
    engine.spec.speculative_algorithm = "NGRAM"
    with pytest.raises(ValueError, match="--speculative-algorithm is NGRAM"):
        CuteMla(runner_with(torch.bfloat16))
    engine.parallel.attn_dcp_size = 2
    with pytest.raises(ValueError, match="--dcp-size is 2; supported: 1"):
        CuteMla(runner_with(torch.bfloat16))
