"""Window layers of dots3-note in SGLang: decode in its wrapper of FlashAttention, on the simulated device, against attention in fp32."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from cute_mla.engines import sglang as adapter
from cute_mla.reference import attention
from cute_mla.spec.arch import SM90, Arch
from tests.engines.sglang_parts import MODULES, Recorded, WindowBase, members
from tests.support.launched import launched_ops

HYBRID, REGISTRY = "sglang.srt.layers.attention.dots_hybrid_backend", "sglang.srt.layers.attention.attention_registry"
PAGE, PAGES, HEADS, COLUMNS, LATENT, SCALE = 64, 5, 8, 1088, 1024, 256**-0.5
WINDOW = 100


def made(engine: SimpleNamespace, dtype: torch.dtype = torch.bfloat16) -> tuple[Any, dict[str, Any]]:
    """Return what SGLang gets for dots3-note, and what it replaces."""
    engine.sparse = True
    adapter.register()
    runner = Recorded(
        members("model_executor.model_runner", "ModelRunner"),
        kv_cache_dtype=dtype,
        model_config=SimpleNamespace(hf_config=None, hf_text_config=engine.dots3()),
    )
    full = engine.factories["cute_mla"](runner)
    assert full == ("FlashAttention of", runner)
    return full, {target: hook for target, (hook, _) in engine.hooks.items()}


class FlashAttention:
    """Stand-in for FlashAttention's backend: metadata of requests in a window pool, in random pages, with NaN where no token sees a key."""

    page_size = PAGE

    def __init__(self, lengths: list[int], tokens: int) -> None:
        draw = torch.Generator().manual_seed(5)
        self.lengths = torch.tensor(lengths, dtype=torch.int32)
        self.table = torch.randperm(PAGES * len(lengths), generator=draw).view(-1, PAGES).to(torch.int32)
        self.pool = torch.full((PAGES * len(lengths) * PAGE, 1, COLUMNS), torch.nan, dtype=torch.bfloat16)
        for row, length in zip(self.table, lengths, strict=True):
            seen = torch.arange(max(length - tokens + 1 - WINDOW, 0), length)
            self.pool[row[seen // PAGE].long() * PAGE + seen % PAGE] = torch.randn(len(seen), 1, COLUMNS, generator=draw).bfloat16()
        self.token_to_kv_pool = SimpleNamespace(get_key_buffer=lambda layer: self.pool)
        self.planned = len(lengths)

    def init_forward_metadata(self, forward_batch: Any) -> None:
        known = members("layers.attention.flashattention_backend", "FlashAttentionMetadata")
        self.forward_metadata = Recorded(known, swa_page_table=self.table[: self.planned], cache_seqlens_int32=self.lengths[: self.planned])

    def expected(self, q: Tensor) -> Tensor:
        """Attention of tokens [requests, tokens, heads, columns]."""
        out = torch.zeros(*q.shape[:3], LATENT)
        for request, (row, length) in enumerate(zip(self.table, self.lengths.tolist(), strict=True)):
            for token in range(q.shape[1]):
                end = length - q.shape[1] + token + 1
                seen = torch.arange(max(end - WINDOW, 0), end)
                keys = self.pool[row[seen // PAGE].long() * PAGE + seen % PAGE, 0].float()
                if len(keys):
                    seen_by_all = torch.ones(1, len(keys), dtype=torch.bool)
                    row_out, _ = attention(q[request, token, :, None].float(), keys[None], keys[None, :, :LATENT], SCALE, seen_by_all)
                    out[request, token] = row_out[:, 0]
        return out


def layer() -> Any:
    known = members("layers.radix_attention", "RadixAttention")
    return Recorded(
        known, tp_q_head_num=HEADS, head_dim=COLUMNS, v_head_dim=LATENT, scaling=SCALE, layer_id=3, sliding_window_size=WINDOW - 1
    )


def attend(engine: SimpleNamespace, arch: Arch, full: FlashAttention, tokens: int, in_graph: bool) -> list[str]:
    """Attend twice in each of two steps, and return the ops that were launched. in_graph: warm-up and capture after one initialisation."""
    _, hooks = made(engine)
    backend = hooks[f"{HYBRID}.DotsSWAMLAAttnBackend"](full)
    batch = SimpleNamespace(batch_size=len(full.lengths), seq_lens=full.lengths.long())
    q = torch.randn(len(full.lengths), tokens, HEADS, COLUMNS, generator=torch.Generator().manual_seed(3)).bfloat16()
    with launched_ops(arch) as ops:
        for step in range(2):
            if not (in_graph and step):
                backend.init_forward_metadata(batch)
            if in_graph:
                backend.init_forward_metadata_in_graph(batch)
            for _ in range(2):
                out = backend.forward_swa_mla_absorbed(q.flatten(0, 1), layer(), batch)
                assert out.shape == (len(full.lengths) * tokens, HEADS * LATENT)
                torch.testing.assert_close(out.view(*q.shape[:3], LATENT).float(), full.expected(q), rtol=1e-2, atol=8e-3)
    return ops


@pytest.mark.parametrize("in_graph", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize(("tokens", "lengths"), [(1, [300, 1, 101]), (4, [4, 260])], ids=["decode", "verification"])
def test_window_layers_decode(arch: Arch, engine: SimpleNamespace, tokens: int, lengths: list[int], in_graph: bool) -> None:
    """The first layer of a step plans for the others."""
    full = FlashAttention(lengths, tokens)
    ops = [op for op in attend(engine, arch, full, tokens, in_graph) if op != "combine"]
    assert ops == 2 * ["split_plan", *2 * ["dense_decode"]]


def test_rows_that_pad_a_batch(engine: SimpleNamespace) -> None:
    full = FlashAttention([70, 200, 1], 1)
    full.planned, full.table[2] = 2, 0
    full.pool[full.table[2, 0] * PAGE] = 1
    _, hooks = made(engine)
    backend = hooks[f"{HYBRID}.DotsSWAMLAAttnBackend"](full)
    batch, q = SimpleNamespace(batch_size=3, seq_lens=full.lengths.long()), torch.ones(3, HEADS, COLUMNS).bfloat16()
    with launched_ops(SM90):
        backend.init_forward_metadata(batch)
        out = backend.forward_swa_mla_absorbed(q, layer(), batch)
    torch.testing.assert_close(out.view(3, 1, HEADS, LATENT).float(), full.expected(q[:, None]), rtol=1e-2, atol=8e-3)


def test_what_is_replaced_is_recorded(engine: SimpleNamespace) -> None:
    _, hooks = made(engine)
    sparse = importlib.import_module("cute_mla.engines.sglang.sparse").CuteMlaSparse
    window = hooks.pop(f"{HYBRID}.DotsSWAMLAAttnBackend")
    assert hooks == {f"{REGISTRY}.create_dsa_backend": sparse}
    assert issubclass(window, WindowBase)
    assert MODULES[REGISTRY]["create_dsa_backend"] == MODULES[HYBRID]["wrap_dots_attention_backend"][:1] == ["runner"]


def test_other_pools_are_refused(engine: SimpleNamespace) -> None:
    with pytest.raises(ValueError, match=r"--kv-cache-dtype is torch\.float8_e4m3fn for dots3-note; supported: torch\.bfloat16"):
        made(engine, torch.float8_e4m3fn)
    _, hooks = made(engine)
    full = FlashAttention([70], 1)
    backend = hooks[f"{HYBRID}.DotsSWAMLAAttnBackend"](full)
    batch = SimpleNamespace(batch_size=1, seq_lens=full.lengths)
    backend.init_forward_metadata(batch)
    full.forward_metadata.swa_page_table = None
    with pytest.raises(ValueError, match="window layers have no pool of their own"):
        backend.forward_swa_mla_absorbed(torch.zeros(1, HEADS, COLUMNS), layer(), batch)
