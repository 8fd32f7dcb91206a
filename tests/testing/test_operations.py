"""The calls of cases are such that the API takes them: each smoke case launches the kernel that its problem says."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from cute_mla.manifest import kernel_name
from cute_mla.spec.arch import SM90, Arch
from cute_mla.testing.cases.base import BaseCase
from cute_mla.testing.cases.dense_prefill import DensePrefillCase
from cute_mla.testing.cases.dense_prefill_backward import DensePrefillBackwardCase
from cute_mla.testing.cases.sparse_decode import Pool, SparseDecodeCase
from cute_mla.testing.cases.sparse_prefill import SparsePrefillCase
from cute_mla.testing.operations import OPERATIONS, operation
from cute_mla.testing.suites import (
    cache_gather,
    cache_insert,
    cache_write,
    dense_decode,
    dense_prefill,
    dense_prefill_backward,
    index_write,
    indexer_topk,
    merge_states,
    mqa_logits,
    sparse_decode,
    sparse_prefill,
    topk_indices,
)
from cute_mla.testing.suites.quick import kernels_of
from tests.support.recording_device import RecordingDevice

SMOKE: list[BaseCase] = [*dense_decode.SMOKE, *sparse_decode.SMOKE, *sparse_prefill.SMOKE, *dense_prefill.SMOKE]


def test_every_op_has_its_cases() -> None:
    others = (
        dense_prefill_backward,
        cache_write,
        cache_gather,
        merge_states,
        mqa_logits,
        indexer_topk,
        topk_indices,
        cache_insert,
        index_write,
    )
    assert set(OPERATIONS) == {case.op for case in (*SMOKE, *(case for suites in others for case in suites.SMOKE))}


@pytest.mark.parametrize("case", SMOKE[::3], ids=lambda case: f"{case.op}-{case.id}")
def test_a_case_launches_its_kernel_with_the_workspace_that_it_needs(case: BaseCase, arch: Arch) -> None:
    op = operation(case)
    tensors = op.make_tensors(case, "cpu")
    with RecordingDevice(arch, case.sm_count or arch.sm_count).active() as device:
        nbytes = op.workspace_bytes(case, tensors)
        results = dict(zip(op.results, op.call(case, tensors, torch.zeros(nbytes, dtype=torch.uint8)), strict=True))
        if nbytes:
            with pytest.raises(ValueError, match="workspace has"):
                op.call(case, tensors, torch.zeros(nbytes - 1, dtype=torch.uint8))
    assert results["out"].shape == (*tensors.q.shape[:-1], case.d_v)
    expected = op.reference(case, tensors)
    assert [result.shape for result in results.values()] == [wanted.shape for wanted in expected]
    assert all(results[name] is given.tensor for name, given in tensors.output_buffers.items())
    launched = [launch.kernel for launch in device.launches]
    config = case.problem(arch).config
    assert (kernel_name(case.kernel_op, arch.name, config.name) in launched) == (case.q_shape[0] * case.q_shape[1] > 0)


@pytest.mark.parametrize("case", dense_prefill_backward.SMOKE[::3], ids=lambda case: case.id)
def test_a_backward_case_launches_its_kernels_with_the_workspace_that_it_needs(case: DensePrefillBackwardCase) -> None:
    op = operation(case)
    tensors = op.make_tensors(case, "cpu")
    with RecordingDevice(SM90, case.sm_count or SM90.sm_count).active() as device:
        nbytes = op.workspace_bytes(case, tensors)
        results = op.call(case, tensors, torch.zeros(nbytes, dtype=torch.uint8))
        if nbytes:
            with pytest.raises(ValueError, match="workspace has"):
                op.call(case, tensors, torch.zeros(nbytes - 1, dtype=torch.uint8))
    assert [result.shape for result in results] == [wanted.shape for wanted in op.reference(case, tensors)]
    given = {name: buffer.tensor for name, buffer in tensors.output_buffers.items()}
    assert all(given.get(name, result) is result for name, result in zip(op.results, results, strict=True))
    launched = {launch.kernel for launch in device.launches}
    if case.total_q and case.max_seqlen_k:
        assert launched == kernels_of(case, SM90)
    else:
        assert len(launched) == (case.total_q > 0) + (case.max_seqlen_k > 0)


def test_every_operand_of_a_dense_prefill_case_reaches_the_kernel(arch: Arch) -> None:
    case = DensePrefillCase(
        lengths=((3, 5), (0, 2), (9, 4)), h_kv=2, group=3, causal=True, softmax_scale=0.5, empty_lse=float("-inf"), outputs="strided",
        kv_layout="kvpacked", q_layout="sliced",
    )  # fmt: skip
    op = operation(case)
    tensors = op.make_tensors(case, "cpu")
    with RecordingDevice(arch).active() as device:
        op.call(case, tensors, None)
    args = device.launches[0].args
    names = {"q": tensors.q, "cu_seqlens_q": tensors.cu_seqlens_q, "cu_seqlens_k": tensors.cu_seqlens_k}
    names |= {name: given.tensor for name, given in tensors.output_buffers.items()}
    for name, tensor in names.items():
        assert isinstance(args[name], Tensor)
        assert args[name].data_ptr() == tensor.data_ptr(), name
    assert [args[f"{name}_map"].address for name in "qkv"] == [tensor.data_ptr() for tensor in (tensors.q, tensors.k, tensors.v)]
    assert [args[name] for name in ("batch", "h_q", "heads_per_kv", "total_q", "total_k", "causal")] == [3, 6, 3, 12 + 11, 11 + 11, 1]
    assert (args["scale_log2"], args["empty_lse"]) == (pytest.approx(0.5 * 1.442695), float("-inf"))


def test_every_operand_of_a_prefill_case_reaches_the_kernel(arch: Arch) -> None:
    case = SparsePrefillCase(
        batch=2, form="ragged", s_q=3, h_q=5, s_kv=40, topk=20, lengths="drawn", sinks="drawn", softmax_scale=0.5,
        empty_lse=float("-inf"), outputs="strided", index_layout="odd", kv_layout="padded_rows",
    )  # fmt: skip
    op = operation(case)
    tensors = op.make_tensors(case, "cpu")
    with RecordingDevice(arch).active() as device:
        op.call(case, tensors, None)
    (launch,) = device.launches
    names = {"q": tensors.q, "kv": tensors.kv, "indices": tensors.indices, "topk_length": tensors.topk_length}
    names |= {"attn_sink": tensors.attn_sink, "kv_offsets": tensors.kv_offsets}
    names |= {name: given.tensor for name, given in tensors.output_buffers.items()}
    for name, tensor in names.items():
        assert isinstance(launch.args[name], Tensor)
        assert launch.args[name].data_ptr() == tensor.data_ptr(), name
    assert [launch.args[name] for name in ("tokens", "s_q", "h_q", "s_kv", "topk")] == [6, 3, 5, case.kv_rows, 20]
    assert [launch.args[f"max_logits_stride_{name}"] for name in ("batch", "token", "head")] == [5 * 6, 1, 6]
    assert [launch.args[f"lse_stride_{name}"] for name in ("batch", "token", "head")] == [3 * 8, 8, 1]
    assert (launch.args["kv_stride_batch"], launch.args["kv_stride_row"], launch.args["indices_stride_token"]) == (0, 1280, 23)
    assert (launch.args["scale_log2"], launch.args["empty_lse"]) == (pytest.approx(0.5 * 1.442695), float("-inf"))


@pytest.mark.parametrize("metadata", ["object", "tensors"])
def test_every_operand_of_a_sparse_case_reaches_the_kernel(metadata: str, arch: Arch) -> None:
    case = SparseDecodeCase(
        batch=2, s_q=2, h_q=3, main=Pool(40, 20, 16, "drawn"), extra=Pool(30, 9, 3, "drawn"), sinks="drawn", softmax_scale=0.5,
        empty_lse=float("-inf"), metadata=metadata,  # type: ignore[arg-type]
    )  # fmt: skip
    op = operation(case)
    tensors = op.make_tensors(case, "cpu")
    with RecordingDevice(arch).active() as device:
        op.call(case, tensors, None)
    (args,) = (launch.args for launch in device.launches if launch.kernel.startswith("sparse_decode"))

    def same(argument: object, tensor: Tensor) -> bool:
        return isinstance(argument, Tensor) and argument.data_ptr() == tensor.data_ptr()

    names = {
        "q": tensors.q, "cache": tensors.k_cache, "indices": tensors.indices, "topk_length": tensors.topk_length,
        "extra_cache": tensors.extra_k_cache, "extra_indices": tensors.extra_indices,
        "extra_topk_length": tensors.extra_topk_length, "attn_sink": tensors.attn_sink,
    }  # fmt: skip
    assert all(same(args[name], tensor) for name, tensor in names.items())
    assert (args["topk"], args["extra_topk"], args["page_size"], args["extra_page_size"]) == (20, 9, 16, 3)
    assert (args["scale_log2"], args["empty_lse"]) == (pytest.approx(0.5 * 1.442695), float("-inf"))
