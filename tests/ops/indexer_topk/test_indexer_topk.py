"""indexer_topk and indexer_topk_prefill: chunks, workspace, slots, and that they equal logits and selection."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

import cute_mla
from cute_mla import reference
from cute_mla.indexer import fp8_paged_mqa_logits, indexer_topk, indexer_topk_prefill, topk_indices
from cute_mla.ops import indexer_topk as op
from cute_mla.spec.arch import Arch
from cute_mla.testing.operations.indexer_topk.case import IndexerTopkCase
from cute_mla.testing.operations.indexer_topk.record import INDEXER_TOPK
from tests.support.recording_device import RecordingDevice
from tests.support.right_calls import RightCall, call_of

ROW = 512 * 4  # bytes of a row of logits of 257 to 512 keys
PAGES = IndexerTopkCase(requests=5, tokens=2, keys=300, heads=8, page_size=64, lengths="random", topk=40)
ROWS = IndexerTopkCase(tokens=7, keys=300, heads=8, windows="random", topk=40)


def expected(call: RightCall) -> torch.Tensor:
    return INDEXER_TOPK.reference(call.case, call.tensors)[0]


def limit(monkeypatch: pytest.MonkeyPatch, rows: int, row: int = ROW) -> None:
    """Let so many rows of logits fit."""
    monkeypatch.setattr(op, "divide", partial(op.divide, logits_bytes=rows * row + row - 1))


@pytest.mark.in_turn
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 9, 10])
@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("slots", [False, True])
def test_chunks_change_nothing(arch: Arch, monkeypatch: pytest.MonkeyPatch, rows: int, per_token: bool, slots: bool) -> None:
    """Chunks of one token of two, one request, several requests and a rest; whatever the chunk before left in the workspace."""
    call = call_of(PAGES, per_token=per_token, slots=slots)
    limit(monkeypatch, rows)
    with cute_mla.simulate(arch.name) as device:
        found = call.run()
    chunks = 10 if rows == 1 else -(-5 // (rows // 2))
    assert device.launches == 2 * chunks
    assert torch.equal(found, expected(call))


@pytest.mark.parametrize("rows", [1, 2])
def test_chunks_of_lengths_beyond_the_table(arch: Arch, monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    """Lengths of a request are clipped before the tokens' are made of them."""
    call = call_of(PAGES, requests=6, lengths="edges", topk=310)
    assert call.tensors.ke[5] > 320
    limit(monkeypatch, rows)
    with cute_mla.simulate(arch.name):
        assert torch.equal(call.run(), expected(call))


@pytest.mark.parametrize("windows", ["random", "edges", "causal"])
@pytest.mark.parametrize("rows", [1, 3, 7])
def test_chunks_of_prefill(arch: Arch, monkeypatch: pytest.MonkeyPatch, rows: int, windows: Any) -> None:
    call = call_of(ROWS, windows=windows)
    limit(monkeypatch, rows)
    with cute_mla.simulate(arch.name) as device:
        found = call.run()
    assert device.launches == 2 * -(-7 // rows)
    assert torch.equal(found, expected(call))


def test_it_equals_logits_and_selection(arch: Arch) -> None:
    """Also with logits whose last bits are the kernel's own."""
    arguments = call_of(PAGES, values="plateau")
    arguments["weights"] = torch.randn(arguments["weights"].shape, generator=torch.Generator().manual_seed(1))
    with cute_mla.simulate(arch.name):
        found = indexer_topk(**arguments)
        shared = {name: arguments[name] for name in ("q", "weights", "context_lens", "block_table")}
        logits = fp8_paged_mqa_logits(cache=arguments["index_cache"], metadata=None, max_context_len=320, **shared)
        lengths = reference.paged_ends(arguments["context_lens"], 2, 320).flatten().int()
        assert torch.equal(found, topk_indices(logits, lengths, 40))


def test_prefill_and_decode_choose_the_same(arch: Arch) -> None:
    """The last tokens of a sequence, with its keys in a row and in pages."""
    arguments = call_of(PAGES, requests=1, tokens=4, lengths="full", values="exact")
    kv = reference.indexed_keys(arguments["index_cache"], arguments["block_table"][0], 300)
    with cute_mla.simulate(arch.name):
        paged = indexer_topk(**arguments)
        ke = torch.arange(297, 301, dtype=torch.int32)
        rows = indexer_topk_prefill(arguments["q"][0], kv, arguments["weights"], torch.zeros_like(ke), ke, 40)
    assert torch.equal(paged, rows)


def test_keys_of_no_page_have_no_slot(arch: Arch) -> None:
    """Not one that wraps around to another's: 2147480000 * 64 is a valid slot modulo 2^32."""
    arguments = call_of(PAGES, lengths="full", topk=400, slots=True)
    arguments["block_table"][0, 1:3] = torch.tensor([2147480000, -1], dtype=torch.int32)
    with cute_mla.simulate(arch.name, on_finding="collect"):
        found = indexer_topk(**arguments)
    assert (found[1, 64:192] == -1).all()
    assert (found[1, :64] >= 0).all()
    assert (found[1, 192:300] >= 0).all()


def test_all_keys_are_chosen_without_logits() -> None:
    """Then there is no workspace."""
    with RecordingDevice().active() as device:
        call_of(PAGES, topk=320).run()
    (launch,) = device.launches
    assert (launch.kernel, launch.args["logits"]) == ("topk_indices_sm90_fp32_cluster1", None)
    assert op.divide(5, 2, 320, 320, 132).nbytes == 0


def test_the_workspace_is_what_workspace_size_says(arch: Arch) -> None:
    call = call_of(PAGES, slots=True)
    with cute_mla.simulate(arch.name):
        nbytes = cute_mla.workspace_size("indexer_topk", batch=5, s_q=2, h_q=8, max_cache_seqlen=320, topk=40)
        assert nbytes == 10 * ROW
        workspace, out = torch.full((nbytes + 32,), 255, dtype=torch.uint8), torch.zeros(10, 40, dtype=torch.int32)
        assert call.run(out=out, workspace=workspace[16:-16]) is out
        assert torch.equal(out, expected(call))
        assert (workspace[:16] == 255).all()
        assert (workspace[-16:] == 255).all()
        with pytest.raises(ValueError, match=f"workspace has {nbytes - 1} bytes; supported: at least {nbytes}"):
            call.run(out=out, workspace=torch.zeros(nbytes - 1, dtype=torch.uint8))


@pytest.mark.parametrize("sm_count", [132, 148, 1])
@pytest.mark.parametrize(
    ("batch", "tokens", "columns"),
    [(1, 1, 131_072), (64, 1, 65_536), (4096, 1, 131_072), (2000, 1, 3000), (4096, 2, 1 << 20), (3, 40, 1 << 20), (1, 1, 1 << 24)],
)
def test_logits_take_bounded_memory(batch: int, tokens: int, columns: int, sm_count: int) -> None:
    """And chunks have each token once, in order."""
    found = op.divide(batch, tokens, columns, 2048, sm_count)
    assert 0 < found.nbytes <= (40 if columns <= 131_072 else 64) << 20
    seen = [
        request * tokens + token
        for requests, part in found.chunks.slices()
        for request in range(batch)[requests]
        for token in range(tokens)[part]
    ]
    assert seen == list(range(batch * tokens))
    most = max((requests.stop - requests.start) * (part.stop - part.start) for requests, part in found.chunks.slices())
    assert most == found.chunks.rows


@pytest.mark.parametrize(
    ("sm_count", "columns", "rows"),
    [(132, 131_072, 64), (148, 131_072, 72), (148, 65_536, 144), (132, 3000, 3168), (148, 1 << 18, 64), (132, 1 << 22, 4)],
)
def test_a_chunk_fills_the_sms_with_selections(sm_count: int, columns: int, rows: int) -> None:
    """4, 4, 2, 1, 4 and 8 CTAs a row, two an SM; of rows that are longer still, as many as fit."""
    assert op.divide(4096, 1, columns, 2048, sm_count).chunks.rows == rows


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "topk": ({"topk": -1}, "topk is -1; supported: an integer, 0 to"),
    "slots": ({"slots": 1}, "slots is 1; supported: True and False"),
    "out": ({"out": torch.zeros(10, 41, dtype=torch.int32)}, r"out has shape \[10, 41\]; supported: \[10, 40\]"),
    "long": ({"block_table": torch.zeros(5, (1 << 18) + 1, dtype=torch.int32)}, "up to 16777280 keys; supported: to 16777216"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments(name: str) -> None:
    changes, message = BAD[name]
    with RecordingDevice().active() as device, pytest.raises(ValueError, match=message):
        call_of(PAGES).run(**changes)
    assert device.launches == []


def test_a_result_shares_no_memory() -> None:
    memory = torch.zeros(10 * ROW, dtype=torch.uint8)
    with RecordingDevice().active(), pytest.raises(ValueError, match="out shares memory with workspace"):
        call_of(PAGES).run(workspace=memory, out=memory[: 10 * 40 * 4].view(torch.int32).view(10, 40))


def test_prefill_arguments() -> None:
    call = call_of(ROWS)
    with RecordingDevice().active(), pytest.raises(ValueError, match="max_seqlen_k is -1; supported: an integer, 0 or more"):
        call.run(max_seqlen_k=-1)
    with RecordingDevice().active() as device:
        assert call.run(max_seqlen_k=0).shape == (7, 40)
    assert [launch.args["logits"] for launch in device.launches] == [None]
