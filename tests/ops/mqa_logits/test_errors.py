"""Arguments of the indexer's logits that are refused: each message says what was given and what is supported."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from cute_mla.indexer import get_paged_mqa_logits_metadata
from cute_mla.spec.mqa_logits import ROW_BYTES
from cute_mla.testing.operations.mqa_logits.case import MqaLogitsCase
from tests.support.recording_device import RecordingDevice
from tests.support.right_calls import RightCall, changed
from tests.support.zero_tensors import numbers, zeros

E4M3 = torch.float8_e4m3fn
Change = Callable[[Any], Any]


rows: Callable[..., RightCall] = partial(changed, MqaLogitsCase(heads=8, tokens=3, keys=40, outputs="given"))
pages: Callable[..., RightCall] = partial(changed, MqaLogitsCase(heads=8, requests=2, tokens=2, keys=70, page_size=64, outputs="given"))


def keys(change: Change) -> Change:
    return lambda kv: (change(kv[0]), kv[1])


def scales(change: Change) -> Change:
    return lambda kv: (kv[0], change(kv[1]))


def moved(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy that begins 8 bytes behind a multiple of 16."""
    memory = torch.zeros(tensor.numel() + 8, dtype=torch.uint8)
    return memory[8:].view(tensor.dtype).view(tensor.shape)


def apart(cache: torch.Tensor, stride: int) -> torch.Tensor:
    """Return a cache of the same shape, its pages `stride` bytes apart."""
    storage = torch.zeros(len(cache) * stride + 64, dtype=torch.uint8)
    return storage.as_strided(cache.shape, (stride, ROW_BYTES, ROW_BYTES, 1))


BAD_ROWS = {
    "dimensions of q": (rows(q=lambda q: q[0]), r"q has shape \[8, 128\]; supported: \[tokens, heads, 128\]"),
    "heads": (rows(q=lambda _: zeros(3, 65, 128, dtype=E4M3), weights=lambda _: torch.zeros(3, 65)), "heads is 65; supported: 1 to 64"),
    "stride of q": (rows(q=lambda _: zeros(3, 8, 136, dtype=E4M3)[..., :128]), "q has .*multiples? of 16"),
    "address of q": (rows(q=moved), "q .*16"),
    "kv of one": (rows(kv=lambda kv: kv[0]), "supported: two tensors, keys and their scales"),
    "kv of three": (rows(kv=lambda kv: (*kv, kv[1])), "supported: two tensors, keys and their scales"),
    "columns of kv": (rows(kv=keys(lambda k: k[:, :64])), r"kv has shape \[40, 64\]; supported: \[keys, 128\]"),
    "scales": (rows(kv=scales(lambda s: s[:39])), r"the scale of kv has shape \[39\]; supported: \[40\]"),
    "UE8M0 scales": (rows(kv=scales(lambda s: s.view(torch.int32))), "the scale of kv has dtype torch.int32; supported: torch.float32"),
    "weights": (rows(weights=lambda w: w[:, :7]), r"weights has shape \[3, 7\]; supported: \[3, 8\]"),
    "clean": (rows(clean_logits=lambda _: 1), "clean_logits is 1; supported"),
    "clean relative": (
        rows(max_seqlen_k=lambda _: 9, out=lambda _: None), "clean_logits is True with max_seqlen_k 9; supported: False, or max_seqlen_k 0"
    ),
    "out": (rows(out=lambda out: out[:, 1:]), r"out has shape \[3, 39\]; supported: \[3, 40\]"),
    "gradients": (rows(weights=torch.Tensor.requires_grad_), "weights requires grad"),
}  # fmt: skip
BAD_PAGES = {
    "dimensions of q": (pages(q=lambda q: q[0]), r"q has shape \[2, 8, 128\]; supported: \[batch, tokens, heads, 128\]"),
    "requests of q apart": (pages(q=lambda _: zeros(2, 3, 8, 128, dtype=E4M3)[:, :2]), "q has .*requests 2 tokens apart"),
    "bytes of a key": (pages(cache=lambda c: c[..., :128]), r"cache has shape .*supported: \[pages, page size, 1, 132\]"),
    "page size": (pages(cache=lambda _: torch.zeros(5, 48, 1, 132, dtype=torch.uint8)), "page size is 48; supported: 16, 32, 64, 128"),
    "no pages": (pages(cache=lambda c: c[:0]), "cache has shape .*supported: 1 to"),
    "keys apart": (pages(cache=lambda _: torch.zeros(5, 64, 1, 144, dtype=torch.uint8)[..., :132]), "cache has .*contiguous pages"),
    "pages apart": (pages(cache=lambda c: apart(c, 64 * ROW_BYTES + 4)), "pages a multiple of 16 bytes apart"),
    "pages that overlap": (pages(cache=lambda c: apart(c, 64 * ROW_BYTES - 16)), "pages a multiple of 16 bytes apart, at least 8448"),
    "weights": (pages(weights=lambda w: w[:2]), r"weights has shape \[2, 8\]; supported: \[4, 8\]"),
    "lengths of tokens": (pages(context_lens=lambda lens: lens.view(2, 1)), r"context_lens has shape \[2, 1\]; supported: \[2, 2\]"),
    "table": (pages(block_table=lambda t: t[:1]), r"block_table has shape \[1, 2\]; supported: \[2, pages per request\]"),
    "columns": (pages(max_context_len=lambda _: -1), "max_context_len is -1; supported: an integer, 0 to 1073741824"),
    "out": (pages(out=lambda out: out[:3]), r"out has shape \[3, 70\]; supported: \[4, 70\]"),
}  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "message"), [pytest.param(*case, id=name) for table in (BAD_ROWS, BAD_PAGES) for name, case in table.items()]
)
def test_bad_arguments(arguments: RightCall, message: str) -> None:
    with RecordingDevice().active() as device, pytest.raises(ValueError, match=message):
        arguments.run()
    assert device.launches == []


def test_right_arguments() -> None:
    with RecordingDevice().active() as device:
        rows().run()
        pages().run()
    assert len(device.launches) == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((numbers(5).view(1, 1, 1), 64, 132), r"context_lens has shape \[1, 1, 1\]; supported: \[batch\] and \[batch, tokens\]"),
        ((numbers(5).long(), 64, 132), "context_lens has dtype torch.int64; supported: torch.int32"),
        ((numbers(5, 6, 7, 8)[::2], 64, 132), "context_lens has .*contiguous"),
        ((numbers(5), 48, 132), "block_kv: page size is 48; supported: 16, 32, 64, 128"),
        ((numbers(5), 64, 0), "num_sms is 0; supported: an integer, 1 to"),
        ((numbers(5), 64, None), "num_sms is None; supported: an integer"),
    ],
)
def test_bad_arguments_of_metadata(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        get_paged_mqa_logits_metadata(*arguments)


def test_a_result_shares_no_memory() -> None:
    given = rows()
    given["out"] = torch.zeros(3, 48)[:, :40]
    given["weights"] = given["out"].as_strided((3, 8), (48, 1))
    with RecordingDevice().active(), pytest.raises(ValueError, match="out shares memory with weights"):
        given.run()
    cache = torch.zeros(5, 64, 1, ROW_BYTES, dtype=torch.uint8)
    inside = cache.view(-1).view(torch.float32)[: 4 * 70].view(4, 70)
    with RecordingDevice().active(), pytest.raises(ValueError, match="out shares memory with cache"):
        pages().run(cache=cache, out=inside)
