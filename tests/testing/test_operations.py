"""The calls of cases are such that the API takes them: each smoke case launches the kernel that its problem says."""

from __future__ import annotations

import pytest
import torch
from recording_device import RecordingDevice
from torch import Tensor

from cute_mla.manifest import kernel_name
from cute_mla.spec.arch import Arch
from cute_mla.testing import dense_suites, sparse_suites
from cute_mla.testing.case import BaseCase
from cute_mla.testing.operations import OPERATIONS, operation
from cute_mla.testing.sparse_cases import Pool, SparseCase

SMOKE: list[BaseCase] = [*dense_suites.SMOKE, *sparse_suites.SMOKE]


def test_every_op_has_its_cases() -> None:
    assert set(OPERATIONS) == {case.op for case in SMOKE}


@pytest.mark.parametrize("case", SMOKE, ids=lambda case: f"{case.op}-{case.id}")
def test_a_case_launches_its_kernel_with_the_workspace_that_it_needs(case: BaseCase, arch: Arch) -> None:
    op = operation(case)
    tensors = op.make_tensors(case, "cpu")
    with RecordingDevice(arch, case.sm_count or arch.sm_count).active() as device:
        nbytes = op.workspace_bytes(case, tensors)
        out, lse = op.call(case, tensors, torch.zeros(nbytes, dtype=torch.uint8))
        if nbytes:
            with pytest.raises(ValueError, match="workspace has"):
                op.call(case, tensors, torch.zeros(nbytes - 1, dtype=torch.uint8))
    assert out.shape == (case.batch, case.s_q, case.h_q, 512)
    assert lse.shape == (case.batch, case.h_q, case.s_q)
    launched = [launch.kernel for launch in device.launches]
    config = case.problem(arch).config
    assert (kernel_name(case.op, arch.name, config.name) in launched) == (case.batch > 0)


@pytest.mark.parametrize("metadata", ["object", "tensors"])
def test_every_operand_of_a_sparse_case_reaches_the_kernel(metadata: str, arch: Arch) -> None:
    case = SparseCase(
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
