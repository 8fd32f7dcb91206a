"""fingerprint, record and row_digest: what names depend on and what not, errors, and records of launches."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import cute_mla
from cute_mla import fingerprint, row_digest
from cute_mla.indexer import attention_head_sums, indexer_backward, indexer_scores
from cute_mla.runtime.artifacts import load_artifacts
from cute_mla.runtime.cuda_device import CudaDevice
from cute_mla.runtime.current import cpu_tensors_on
from cute_mla.runtime.recording import active
from cute_mla.spec.arch import Arch
from cute_mla.spec.orders import short_hash
from cute_mla.testing.operations import operation
from cute_mla.testing.operations.sparse_prefill_backward.case import SparsePrefillBackwardCase
from tests.runtime.fake_driver import FakeDriver, installed
from tests.support.right_calls import call_of

Features = dict[str, Any]

# Calls with features that decide, and other values of features that decide on no bit
CALLS: tuple[tuple[str, Features, Features], ...] = (
    ("dense_decode", {"head_dim": 576}, {"h_q": 3, "s_q": 5, "page_size": 128, "batch_invariant": True, "causal": True, "dtype": "bf16"}),
    ("dense_decode", {"head_dim": 512}, {"kv_format": "latent_512"}),
    ("dense_decode", {"head_dim": 576, "dtype": "fp16"}, {"dtype": torch.float16}),
    ("dense_decode", {"head_dim": 576, "kv_format": "fp8_576"}, {"fp8_kvcache": True}),
    ("dense_decode", {"head_dim": 576, "dtype": "e4m3"}, {"kv_format": "fp8_576", "h_q": 3}),
    ("sparse_decode", {"h_q": 20}, {"kv_format": "latent", "topk": 9, "s_q": 2, "attn_sink": True}),
    ("sparse_decode", {"h_q": 20, "kv_format": "fp8_656"}, {"fp8_kvcache": True, "few_heads": False, "h_q": 64}),
    ("sparse_decode", {"h_q": 20, "kv_format": "v41"}, {"kv_format": "v41_paged", "extra_kv_format": "v41_paged"}),
    ("sparse_decode", {"h_q": 20, "kv_format": "v41", "extra_kv_format": "v41_fp4"}, {"kv_format": "v41_paged"}),
    ("sparse_prefill", {"h_q": 1, "head_dim": 576}, {"h_q": 64, "topk": 9, "s_q": 2, "indexer_topk": 0}),
    ("dense_prefill", {"head_dim": 192}, {"h_q": 3, "h_kv": 1, "causal": True, "key_mask": False}),
    ("dense_prefill", {"head_dim": 192, "key_mask": True}, {"h_q": 3}),
    ("mqa_logits", {"h_q": 33}, {"h_q": 64, "page_size": 64, "s_q": 4}),
    ("indexer_topk", {"h_q": 32}, {"h_q": 5, "topk": 9}),
    ("indexer_topk", {"h_q": 33}, {}),
    ("topk_indices", {}, {"topk": 9}),
    ("head_sums", {"head_dim": 576}, {"h_q": 3, "s_q": 5, "topk": 9, "attn_sink": True, "kv_offsets": True}),
    ("head_sums", {"head_dim": 512}, {"h_q": 128}),
    ("head_sums", {"head_dim": 128}, {"h_q": 64, "topk_length": True}),
    ("indexer_backward", {}, {"head_dim": 128, "h_q": 64, "s_q": 5, "topk": 9, "kv_offsets": True}),
)


def test_only_what_decides_on_bits_changes_a_fingerprint(arch: Arch) -> None:
    found = [fingerprint(op, arch.name, **needed) for op, needed, _ in CALLS]
    for (op, needed, others), expected in zip(CALLS, found, strict=True):
        for name, value in others.items():
            assert fingerprint(op, arch.name, **{**needed, name: value}) == expected, f"{op}, {name}"
    orders, codes, terms = map(set, zip(*found, strict=True))
    assert len(codes) == len(found)
    assert len(orders) == len(terms) == len(found) - 1  # sparse prefill has that of sparse decode over a latent


def test_heads_and_architectures_have_classes() -> None:
    def orders(op: str, arch: str, heads: tuple[int, ...], **features: Any) -> list[str]:
        return [fingerprint(op, arch, h_q=h_q, **features).order for h_q in heads]

    few, some, many = orders("sparse_prefill", "sm100", (1, 64, 65), head_dim=576)
    assert few == some != many
    few, many = orders("sparse_decode", "sm90", (16, 17), kv_format="fp8_656")
    assert few != many
    assert orders("sparse_decode", "sm90", (1, 128), kv_format="fp8_656", few_heads=False) == [many, many]
    few, some, many = orders("dense_decode", "sm120", (16, 17, 128), head_dim=576)
    assert few != some == many
    assert orders("mqa_logits", "sm103", (8,)) == orders("mqa_logits", "sm100", (8,)) != orders("mqa_logits", "sm90", (8,))
    assert fingerprint("topk_indices", "sm90").order == fingerprint("topk_indices", "sm100").order


def test_a_backward_has_the_orders_of_its_launches() -> None:
    """In their sequence, each once; heads in one tile of 64 and in two have other sums for dkv."""
    case = SparsePrefillBackwardCase(s_q=2, h_q=3, s_kv=70, topk=66, chunked=True, sm_count=2)
    with cute_mla.simulate("sm90", sm_count=2), cute_mla.record() as calls:
        operation(case).call(case, operation(case).make_tensors(case, "cpu"), None)
    assert len(calls) == 1 + 2 * 6
    found = fingerprint("sparse_prefill_backward", "sm90", head_dim=576, h_q=3)
    assert found.order == short_hash(*dict.fromkeys(str(call.order) for call in calls))
    assert found.code == short_hash(*dict.fromkeys(str(call.code) for call in calls))
    assert fingerprint("sparse_prefill_backward", "sm90", head_dim=576, h_q=64) == found
    others = [fingerprint("sparse_prefill_backward", "sm90", head_dim=d_qk, h_q=h_q) for d_qk, h_q in ((576, 65), (512, 3))]
    assert len({found, *others}) == 3


def indexer_bits(dk_dtype: torch.dtype, picks: tuple[int, ...], max_workspace: int) -> dict[str, list[int]]:
    """Return digests of what request 1 of 3 gets in calls of some of them, by the name of their launches. Calls have more slots than it."""
    draw = torch.Generator().manual_seed(0)
    q, latent = torch.randn(3, 2, 65, 576, generator=draw).bfloat16(), torch.randn(3, 90, 1, 576, generator=draw).bfloat16()
    terms = torch.randn(3, 2, 65, generator=draw)
    indices = torch.rand(3, 2, 1, 90, generator=draw).argsort().int()[..., : 65 + len(picks)]
    lengths, own, found = torch.full((3, 2), 65, dtype=torch.int32), list(picks), {}
    q, latent, terms, indices, lengths = (each[own] for each in (q, latent, terms, indices, lengths))
    index = (q[..., :64, :128], latent[..., 0, :128].contiguous(), terms[..., :64])
    dscores = torch.ones(indices.shape[:2] + indices.shape[-1:])
    dk = None if dk_dtype == torch.bfloat16 else torch.empty(index[1].shape, dtype=dk_dtype)
    for run in (
        lambda: attention_head_sums(q, latent, terms + 60, indices, 0.1, topk_length=lengths),
        lambda: attention_head_sums(q[..., :512], latent[..., :512], terms + 60, indices, 0.1, topk_length=lengths),
        lambda: indexer_scores(*index, indices, lengths),
        lambda: indexer_backward(*index, indices, dscores, lengths, max_workspace=max_workspace, dk=dk),
    ):
        with cute_mla.record() as calls:
            results = run()
        orders = tuple(dict.fromkeys(str(call.order) for call in calls))
        parts = results if isinstance(results, tuple) else (results[..., :65],)
        bits = torch.cat([row_digest(part[own.index(1)]) for part in parts])
        found[orders[0] if len(orders) == 1 else short_hash(*orders)] = bits.tolist()
    return found


def test_calls_of_a_trainer_have_their_fingerprints(arch: Arch) -> None:
    """Alone and in a batch, in chunks and whole, on other numbers of SMs: equal names, and equal bits. dk in fp32 has a name of its own."""
    names = [fingerprint("head_sums", arch.name, head_dim=columns).order for columns in (576, 512, 128)]
    names.append(fingerprint("indexer_backward", arch.name).order)
    calls = ((1, (1,), 1 << 30), (7, (2, 1, 0), 1 << 30), (3, (0, 1), 0))
    found = []
    for sm_count, picks, max_workspace in calls:
        with cute_mla.simulate(arch.name, sm_count=sm_count):
            found.append(indexer_bits(torch.bfloat16, picks, max_workspace))
    assert list(found[0]) == names
    assert found[0] == found[1] == found[2]
    with cute_mla.simulate(arch.name, sm_count=2):
        *sums, wide = indexer_bits(torch.float32, (1,), 0)
    assert sums == names[:3]
    assert wide != names[3]


def test_code_needs_every_kernel_of_an_order(monkeypatch: pytest.MonkeyPatch) -> None:
    built = fingerprint("dense_decode", "sm90", head_dim=576)
    assert built.code is not None
    assert json.loads(built.terms)["split"] == "every 8192 keys, merged in fp32, ascending"
    for missing in ("dense_decode_sm90_bf16_cluster2", "combine_sm90_bf16"):
        with monkeypatch.context() as patched:
            patched.delitem(load_artifacts().manifest.kernels, missing)
            assert fingerprint("dense_decode", "sm90", head_dim=576) == built._replace(code=None)
    monkeypatch.setenv("CUTE_MLA_ARTIFACTS", "/nowhere")
    assert fingerprint("dense_decode", "sm90", head_dim=576) == built._replace(code=None)


@pytest.mark.parametrize(
    ("op", "features", "message"),
    [
        ("merge_states", {}, "op is 'merge_states'; supported: dense_decode, "),
        ("dense_decode", {}, "head_dim is missing; supported: "),
        ("sparse_decode", {"h_q": 3, "fp8_kvcache": True}, "kv_format is missing; supported: "),
        ("sparse_decode", {"h_q": 3, "head_dim": 512}, "kv_format is missing; supported: "),
        ("sparse_decode", {"h_q": 3, "kv_format": "v41", "extra_cache": True}, "extra_kv_format is missing; supported: "),
        ("dense_decode", {"head_dim": 576, "batch_invariant": False}, "batch_invariant is False; supported: True"),
        ("dense_decode", {"head_dim": 192}, "head_dim is 192; supported: 576, 512, 320"),
        ("head_sums", {"h_q": 3}, "head_dim is missing; supported: "),
        ("indexer_backward", {"head_dim": 576}, "head_dim is 576; supported: 128"),
        ("dense_decode", {"head_dim": 576, "few_heads": 1}, "few_heads is 1; supported: True and False"),
    ],
)
def test_what_is_not_supported_is_an_error(op: str, features: Features, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fingerprint(op, "sm90", **features)


@pytest.fixture
def device(arch: Arch, monkeypatch: pytest.MonkeyPatch) -> Iterator[CudaDevice]:
    """Yield a CUDA device whose driver launches nothing; CPU tensors are on it."""
    params = {kernel.entry: kernel.params for kernel in load_artifacts().manifest.kernels.values()}
    with installed(FakeDriver(params, capability=arch.compute_capabilities[0], sm_count=8), monkeypatch):
        device = CudaDevice(0)
        with cpu_tensors_on(device):
            yield device


def test_launches_are_recorded(arch: Arch, device: CudaDevice) -> None:
    decode = call_of("dense", h_q=64, batch_invariant=True)
    with cute_mla.record() as outer:
        decode.run()
        with cute_mla.record() as inner:
            decode.run()  # as it was prepared
            call_of("sparse_prefill").run()
            call_of("indexer_topk_prefill").run()
            call_of("dense").run()
    decode.run()
    assert not active
    assert outer == [inner[0], *inner]
    assert {"dtype": "bf16", "d_qk": 576, "batch": 2, "h_q": 64}.items() <= outer[0].dims.items()
    wanted: tuple[tuple[str, Features], ...] = (
        ("dense_decode", {"head_dim": 576}),
        ("sparse_prefill", {"head_dim": 576, "h_q": 64}),
        ("mqa_logits", {"h_q": 8}),
    )
    named = [(op, *fingerprint(op, arch.name, **features)[:2]) for op, features in (*wanted, ("topk_indices", {}))]
    assert [(call.op, call.order, call.code) for call in inner] == [*named, ("dense_decode", None, None)]


TYPES = (torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.bool, torch.int64, torch.complex64, torch.complex128)


@pytest.mark.parametrize("dtype", TYPES)
def test_digests_are_of_the_bits_of_a_row(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randint(0, 2, (4, 3, 9), generator=torch.Generator().manual_seed(0)).to(dtype)
    digests = row_digest(x)
    assert (digests.dtype, digests.shape) == (torch.int64, (12,))
    assert torch.equal(row_digest(x[2]), digests[6:9]), "a batch has no influence"
    assert torch.equal(row_digest(x.transpose(0, 2).contiguous().transpose(0, 2)), digests), "nor have strides"
    for column in range(9):
        other = x.clone()
        other[1, 1, column] = not bool(x[1, 1, column])
        assert (row_digest(other) != digests).nonzero().flatten().tolist() == [4]
    monkeypatch.setattr("cute_mla.ops.row_digest._ELEMENTS", 20)
    assert torch.equal(row_digest(x), digests), "nor has the number of rows"


def test_digests_tell_places_signs_and_nans_apart() -> None:
    words = torch.tensor([0x7FC00000, 0x7FC00001, 0, -(1 << 31)], dtype=torch.int32).view(torch.float32)
    rows = [*words[:, None], words[:2], words[[1, 0]], torch.zeros(2), torch.zeros(3)]
    assert len({int(row_digest(row)) for row in rows}) == len(rows)
    assert row_digest(torch.zeros(0, 4)).shape == (0,)
    assert row_digest(torch.zeros(3, 0)).tolist() == [0, 0, 0]
    with pytest.raises(ValueError, match=r"x is .*; supported: a torch tensor with at least one dimension"):
        row_digest(torch.zeros(()))
