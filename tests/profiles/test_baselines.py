"""Adapters of other libraries, as far as they go without a GPU.

Fakes insist on each library's conventions and compute by the reference. torch's attention runs on the CPU.
"""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend

from cute_mla import reference
from cute_mla.cache import dequantise_cache
from cute_mla.profiles.baselines import BASELINES
from cute_mla.profiles.baselines import flash_attention as fa4
from cute_mla.profiles.baselines import flash_attention_3 as fa3
from cute_mla.profiles.baselines import flash_mla as fm
from cute_mla.profiles.baselines.sdpa import Sdpa
from cute_mla.profiles.rows import OPS, Case, load
from cute_mla.profiles.shapes import DecodeShape, DensePrefillShape, SparseDecodeShape, SparsePrefillShape
from cute_mla.profiles.workloads import make_workload
from cute_mla.profiles.workloads import workload as workload_module
from cute_mla.profiles.workloads.workload import Workload
from cute_mla.spec.dense_decode import FP8, FP8_CACHE
from tests.profiles.benching import FakeKernel, case_of, install, small_case

CPU = torch.device("cpu")
SPARSE = case_of("sparse_decode", SparseDecodeShape(batch=2, s_q=2, h_q=16, topk=64, context=80))
PREFILL = case_of("sparse_prefill", SparsePrefillShape(s_q=3, h_q=70, s_kv=200, topk=128))
EQUAL = case_of("dense_prefill", DensePrefillShape(lengths=(70, 70), h_q=2, h_kv=2, causal=True))
FULL = case_of("dense_prefill", DensePrefillShape(lengths=(70,), h_q=4, h_kv=2, causal=False))
MASKED = case_of("dense_prefill", DensePrefillShape(lengths=(70,), h_q=4, h_kv=2, causal=True, shown=9))
RAGGED = case_of("dense_prefill", DensePrefillShape(lengths=(70, 3), h_q=2, h_kv=2, causal=True))


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Make workloads without kernels and without a device, of two sets."""
    install(monkeypatch, FakeKernel())
    monkeypatch.setattr(workload_module, "rotation_sets", lambda set_bytes, l2_bytes: 2)
    return lambda case: make_workload(case, CPU, 1)


def assert_right(baseline: Any, workload: Workload, names: set[str]) -> None:
    """Check that the baseline's runs, one per set, repeatedly give these results, and right ones."""
    assert baseline.unsupported_reason(workload.case) == ""
    runs = baseline.runs(workload)
    assert len(runs) == len(workload.sets) == 2
    for _ in range(2):
        results = [run() for run in runs]
        assert all(set(found) == names for found in results)
        check = workload.check(results, list(zip(workload.sets, results, strict=True)))
        assert check.passed, check.reason
        swapped = list(zip(workload.sets, reversed(results), strict=True))
        assert not workload.check([], swapped).passed  # each run belongs to its own set


class FlashMlaFake:
    """The module flash_mla: what it insists on is what the real one does on Hopper."""

    def __init__(self) -> None:
        self.plans: list[Any] = []

    def get_mla_metadata(self) -> tuple[Any, None]:
        self.plans.append(SimpleNamespace(tile_scheduler_metadata=None, num_splits=None))
        return self.plans[-1], None

    def get_mla_decoding_metadata(
        self, seqlens_k: torch.Tensor, rows: int, h_k: int, *, is_fp8_kvcache: bool, use_legacy: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert (use_legacy, is_fp8_kvcache, h_k, seqlens_k.dtype) == (True, True, 1, torch.int32)
        assert rows > 0
        return torch.zeros(1, 8), torch.zeros(len(seqlens_k) + 1)

    def flash_mla_with_kvcache(
        self, q: torch.Tensor, k_cache: torch.Tensor, table: Any, lengths: Any, head_dim_v: int, plan: Any, *, use_legacy: bool,
        is_fp8_kvcache: bool, causal: bool = False, indices: Any = None, descale_q: Any = None, descale_k: Any = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        assert (use_legacy, head_dim_v, plan in self.plans) == (True, 512, True)
        if indices is None:
            assert (plan.num_splits is not None) or not is_fp8_kvcache
            assert (descale_q is not None) == is_fp8_kvcache
            assert k_cache.shape[1] == 64
            out, lse = reference.dense_decode(q, k_cache, table, lengths, causal=causal, descales=(descale_q, descale_k))
        else:
            assert is_fp8_kvcache
            assert q.shape[2] in (64, 128)
            slots = dequantise_cache(k_cache, "fp8_656").flatten(0, 2)
            out, lse = reference.sparse_decode(q, [reference.IndexedCache(slots, indices)])
        return out.to(torch.bfloat16), lse

    def flash_mla_sparse_fwd(self, q: torch.Tensor, kv: torch.Tensor, indices: torch.Tensor, sm_scale: float, *, use_legacy: bool) -> Any:
        assert use_legacy
        assert q.shape[1] in (64, 128)
        assert indices.shape[2] % 128 == 0
        out, max_logits, lse = reference.sparse_prefill(q, kv, indices, sm_scale)
        return out.to(torch.bfloat16), max_logits, lse


@pytest.fixture
def flash_mla(monkeypatch: pytest.MonkeyPatch) -> FlashMlaFake:
    """Return the fake, where the adapter imports the library."""
    fake = FlashMlaFake()
    monkeypatch.setitem(sys.modules, "flash_mla", fake)  # type: ignore[arg-type]
    return fake


@pytest.mark.parametrize(
    ("case", "names"),
    [
        (small_case(lengths=(130, 3, 0), s_q=2, h_q=4), {"out", "lse"}),
        (small_case(lengths=(130, 3), s_q=1, h_q=4, operands=FP8), {"out", "lse"}),
        (SPARSE, {"out", "lse"}),
        (PREFILL, {"out", "max_logits", "lse"}),
    ],
    ids=["dense", "e4m3", "sparse decode of few heads", "sparse prefill of some heads"],
)
def test_flash_mla_is_called_by_its_conventions(made: Any, flash_mla: FlashMlaFake, case: Case, names: set[str]) -> None:
    assert_right(fm.FlashMla(), made(case), names)
    assert len(flash_mla.plans) == (0 if case is PREFILL else 1)  # one plan for all sets, made outside the runs


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        (small_case(operands=FP8_CACHE), "e4m3 cache with e4m3 queries only"),
        (replace(small_case(), shape=DecodeShape(lengths=(5,), s_q=1, h_q=1, page_size=32)), "pages have 64 keys"),
        (case_of("sparse_decode", SparseDecodeShape(batch=1, s_q=1, h_q=64, topk=64, context=64, cache="latent")), "fp8_656 alone"),
        (case_of("sparse_decode", SparseDecodeShape(batch=1, s_q=1, h_q=64, topk=65, context=70)), "a multiple of 64"),
        (case_of("sparse_prefill", SparsePrefillShape(s_q=1, h_q=64, s_kv=200, topk=64)), "a multiple of 128"),
    ],
)
def test_flash_mla_says_what_it_does_not_take(case: Case, reason: str) -> None:
    assert reason in fm.FlashMla().unsupported_reason(case)


def test_heads_are_padded_with_zeros_and_never_cut() -> None:
    q = torch.ones(2, 3, 70)
    padded = fm.padded_heads(q, 2)
    assert padded.shape == (2, 3, 128)
    assert torch.equal(padded[..., :70], q)
    assert not padded[..., 70:].any()
    assert fm.padded_heads(torch.ones(1, 64), 1).shape == (1, 64)
    assert fm.padded_heads(torch.ones(1, 8), 1).shape == (1, 64)


def attention_of(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """bf16 out [b, s, h, d] and lse [b, h, s], of operands [b, s, h, d]."""
    batch, tokens = q.shape[:2]
    ends = torch.arange(batch + 1) * tokens
    rows, keys, values = (tensor.flatten(0, 1) for tensor in (q, k, v))
    out, lse = reference.dense_prefill(rows, keys, values, ends, ends, causal=causal)
    return out.to(torch.bfloat16).unflatten(0, (batch, tokens)), lse.unflatten(0, (batch, tokens)).transpose(1, 2)


class FlashAttentionFake:
    """The module flash_attn.cute."""

    def flash_attn_func(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool, return_lse: bool) -> Any:
        assert return_lse
        assert q.dim() == 4
        return attention_of(q, k, v, causal)

    def flash_attn_varlen_func(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor,
        max_seqlen_q: int, max_seqlen_k: int, causal: bool, return_lse: bool,
    ) -> Any:  # fmt: skip
        assert return_lse
        assert max_seqlen_q == max_seqlen_k == int(cu_seqlens_q.diff().max())
        out, lse = reference.dense_prefill(q, k, v, cu_seqlens_q, cu_seqlens_k, causal=causal)
        return out.to(torch.bfloat16), lse.transpose(0, 1)


@pytest.mark.parametrize("case", [EQUAL, FULL, RAGGED], ids=["equal", "full", "ragged"])
def test_flash_attention_is_called_by_its_conventions(made: Any, monkeypatch: pytest.MonkeyPatch, case: Case) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn", SimpleNamespace())  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "flash_attn.cute", FlashAttentionFake())  # type: ignore[arg-type]
    assert_right(fa4.FlashAttention4(), made(case), {"out", "lse"})


class FlashAttention3Fake:
    """The module fa3_fwd_interface, built without pages and without fp16."""

    def flash_attn_with_kvcache(
        self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, *, qv: torch.Tensor, cache_seqlens: torch.Tensor,
        causal: bool, **options: Any,
    ) -> Any:  # fmt: skip
        assert (q.shape[-1], qv.shape[-1], k_cache.shape[-1], v_cache.shape[-1]) == (64, 512, 64, 512)
        assert (q.is_contiguous(), qv.is_contiguous(), k_cache.stride(-1), v_cache.stride(-1)) == (True, True, 1, 1)
        assert (k_cache.shape[0], cache_seqlens.dtype) == (len(q), torch.int32)
        assert options == {"softmax_scale": 576**-0.5, "num_splits": 0, "return_softmax_lse": True}
        pages = torch.cat((v_cache, k_cache), dim=-1)  # a page a request
        table = torch.arange(len(q), dtype=torch.int32)[:, None]
        out, lse = reference.dense_decode(torch.cat((qv, q), dim=-1), pages, table, cache_seqlens, causal=causal)
        return out.to(torch.bfloat16), lse, torch.tensor([]), torch.tensor([])

    def flash_attn_func(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool, return_attn_probs: bool) -> Any:
        return FlashAttentionFake().flash_attn_func(q, k, v, causal=causal, return_lse=return_attn_probs)

    def flash_attn_varlen_func(self, *operands: torch.Tensor, return_attn_probs: bool, **options: Any) -> Any:
        return FlashAttentionFake().flash_attn_varlen_func(*operands, return_lse=return_attn_probs, **options)


@pytest.mark.parametrize(
    "case",
    [EQUAL, FULL, RAGGED, small_case(lengths=(130, 3), s_q=2, h_q=4), small_case(lengths=(64, 65), s_q=1, h_q=4)],
    ids=["equal", "full", "ragged", "decode", "decode of one token"],
)
def test_flash_attention_3_is_called_by_its_conventions(made: Any, monkeypatch: pytest.MonkeyPatch, case: Case) -> None:
    monkeypatch.setitem(sys.modules, "fa3_fwd_interface", FlashAttention3Fake())  # type: ignore[arg-type]
    assert_right(fa3.FlashAttention3(), made(case), {"out", "lse"})


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        (small_case(operands=FP8), "latents of 576 alone"),
        (replace(small_case(), dtype="fp16"), "built for bf16"),
        (replace(small_case(), shape=DecodeShape(lengths=(5,), s_q=1, h_q=1, d_qk=512)), "latents of 576 alone"),
        (replace(small_case(), shape=DecodeShape(lengths=(5, 6), s_q=2, tokens=(1, 2), h_q=1)), "equally many query tokens"),
        (MASKED, "no mask of keys"),
    ],
)
def test_flash_attention_3_says_what_it_does_not_take(case: Case, reason: str) -> None:
    assert reason in fa3.FlashAttention3().unsupported_reason(case)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("case", [EQUAL, FULL], ids=["equal", "full, grouped heads"])
def test_torch_attention_gives_the_answer(made: Any, case: Case, padded: bool) -> None:
    assert_right(Sdpa("SDPA", SDPBackend.MATH, padded=padded), made(case), {"out"})


def test_torch_attention_does_not_take_sequences_of_several_lengths() -> None:
    assert "one length" in Sdpa("SDPA", SDPBackend.MATH, padded=False).unsupported_reason(RAGGED)
    assert "no mask of keys" in Sdpa("SDPA", SDPBackend.MATH, padded=False).unsupported_reason(MASKED)
    assert "no mask of keys" in fa4.FlashAttention4().unsupported_reason(MASKED)


def test_every_prefill_and_decode_has_a_baseline_that_covers_its_rows() -> None:
    assert len({baseline.name for baseline in BASELINES}) == len(BASELINES)
    assert {op for baseline in BASELINES for op in baseline.ops} == set(OPS) - {
        "sparse_prefill_backward",
        "combine",
        "merge_states",
        "cache_write",
        "cache_insert",
        "index_write",
        "topk_indices",
        "indexer_topk",
    }
    for baseline in BASELINES:
        for op in baseline.ops:
            assert any(baseline.unsupported_reason(case) == "" for case in load(op))


def test_a_missing_library_is_an_import_error(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("flash_mla", "fa3_fwd_interface", "flash_attn", "flash_attn.cute"):
        monkeypatch.setitem(sys.modules, name, None)
    for baseline in (fm.FlashMla(), fa3.FlashAttention3(), fa4.FlashAttention4()):
        with pytest.raises(ImportError):
            baseline.version()
    assert math.isfinite(float(Sdpa("SDPA", SDPBackend.MATH, padded=False).version().split(".")[0]))
