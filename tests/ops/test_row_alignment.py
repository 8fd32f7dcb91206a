"""Rows of queries and results: where they may begin, and the copy that an error asks for."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import cute_mla
from cute_mla.spec.arch import ARCHS, SM90
from cute_mla.spec.dense_decode import TILINGS
from cute_mla.spec.dense_prefill import ROW_BYTES
from cute_mla.spec.kernel_ops import ARCHS_OF
from tests.support.recording_device import RecordingDevice
from tests.support.right_calls import call_of

E4M3 = torch.float8_e4m3fn


class Rows(NamedTuple):
    """A tensor of a call: its name and shape, the call, and fields of its case."""

    name: str
    shape: tuple[int, ...]
    call: str
    fields: dict[str, Any]
    dtype: torch.dtype = torch.bfloat16

    def run(self, tensor: Tensor) -> None:
        """Run the call with another tensor in the place of this one."""
        call_of(self.call, **self.fields).run(**{self.name: tensor})


ATTENTION = [arch.name for arch in ARCHS_OF["dense_prefill_backward"]]
_DECODE = {"batch": 1, "s_q": 2, "h_q": 16}
_PREFILL = {"lengths": ((13, 40), (7, 10))}
DECODED = {
    "dense decode, q": Rows("q", (1, 2, 16, 576), "dense", _DECODE),
    "dense decode, out": Rows("out", (1, 2, 16, 512), "dense", _DECODE),
    "dense decode, e4m3 q": Rows("q", (1, 2, 16, 576), "dense_fp8", _DECODE, E4M3),
    "sparse decode, q": Rows("q", (1, 2, 16, 576), "sparse", _DECODE),
    "sparse decode, out": Rows("out", (1, 2, 16, 512), "sparse", _DECODE),
    "sparse prefill, q": Rows("q", (5, 16, 576), "sparse_prefill", {"h_q": 16}),
    "sparse prefill, out": Rows("out", (5, 16, 512), "sparse_prefill", {"h_q": 16}),
}
PREFILLED = {
    "dense prefill, q": Rows("q", (20, 8, 192), "dense_prefill", _PREFILL),
    "dense prefill, out": Rows("out", (20, 8, 128), "dense_prefill", _PREFILL),
    **{
        f"backward, {name}": Rows(name, (20, 8, columns), "backward", _PREFILL)
        for name, columns in (("q", 192), ("dout", 128), ("out", 128), ("dq", 192))
    },
}
EVERY = {**DECODED, **PREFILLED}


def strided(rows: Rows, apart: int, offset: int = 0) -> Tensor:
    """Return a tensor whose rows lie so many bytes further apart than they are long, and begin so many bytes behind the first."""
    size = rows.dtype.itemsize
    more, before = apart // size, offset // size
    wide = torch.zeros(*rows.shape[:-1], rows.shape[-1] + more, dtype=torch.float32).to(rows.dtype)
    if not before:
        return wide[..., : rows.shape[-1]]
    flat = torch.zeros(wide.numel() + before).to(rows.dtype)[before:]
    return flat.view(wide.shape)[..., : rows.shape[-1]]


def needed(name: str, arch: str) -> int:
    """Return the bytes at multiples of which rows of a tensor begin."""
    return TILINGS[arch].row_bytes if name in DECODED else ROW_BYTES


def supported(name: str, arch: str) -> str:
    """Return what an error says of these bytes."""
    return f"supported: multiples of {needed(name, arch)} bytes"


@pytest.mark.parametrize("arch", ATTENTION)
@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("nbytes", [2, 4, 8, 16, 32])
def test_rows_apart(name: str, arch: str, nbytes: int) -> None:
    own, tensor = EVERY[name].name, strided(EVERY[name], nbytes)
    with RecordingDevice(ARCHS[arch]).active() as device:
        if nbytes % needed(name, arch) == 0:
            EVERY[name].run(tensor)
            assert device.launches
            return
        copy = "a new tensor" if own in ("out", "dq") and name != "backward, out" else r"a copy by \.contiguous\(\)"
        said = f"^{own} has shape .*so rows begin at multiples of {nbytes} bytes; {supported(name, arch)}, as in {copy}"
        with pytest.raises(ValueError, match=said):
            EVERY[name].run(tensor)
        assert device.launches == []
        EVERY[name].run(tensor.contiguous())
        assert device.launches


@pytest.mark.parametrize("arch", ATTENTION)
@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("nbytes", [2, 4, 8, 16])
def test_first_rows(name: str, arch: str, nbytes: int) -> None:
    own, tensor = EVERY[name].name, strided(EVERY[name], 0, nbytes)
    with RecordingDevice(ARCHS[arch]).active() as device:
        if nbytes % needed(name, arch) == 0:
            EVERY[name].run(tensor)
            assert device.launches
            return
        said = rf"{own}.* starts at a multiple of {nbytes} bytes; {supported(name, arch)}, as in a copy by \.clone\(\)"
        with pytest.raises(ValueError, match=said):
            EVERY[name].run(tensor)
        assert device.launches == []
        EVERY[name].run(tensor.clone())
        assert device.launches


@pytest.mark.parametrize("name", ["dense prefill, q", "backward, q", "backward, dout"])
def test_rows_that_share_memory(name: str) -> None:
    """A stride of 0 is in no tensor map."""
    rows = EVERY[name]
    tensor = torch.zeros(1, *rows.shape[1:], dtype=rows.dtype).expand(rows.shape)
    with RecordingDevice(SM90).active():
        with pytest.raises(ValueError, match=r"0 bytes along dimension 0; supported: positive multiples of 16 .* by \.contiguous\(\)"):
            rows.run(tensor)
        rows.run(tensor.contiguous())


@pytest.mark.parametrize("gradient", ["dk", "dv"])
@pytest.mark.parametrize("arch", ATTENTION)
def test_gradients_of_keys_begin_at_any_element(arch: str, gradient: str) -> None:
    columns = {"dk": 192, "dv": 128}[gradient]
    with RecordingDevice(ARCHS[arch]).active() as device:
        call_of("backward", **_PREFILL).run(**{gradient: torch.zeros(50, 2, columns + 1, dtype=torch.bfloat16)[..., 1:]})
    assert device.launches[1].args["aligned"] == 0


def test_the_gradient_of_a_sum_is_copied() -> None:
    """Autograd makes expanded gradients, whose rows share memory."""
    q, k, v = (torch.zeros(20, 2, columns, dtype=torch.bfloat16, requires_grad=True) for columns in (192, 192, 128))
    ends = torch.tensor([0, 20], dtype=torch.int32)
    with RecordingDevice(SM90).active() as device:
        out, _ = cute_mla.flash_attn_varlen_func(q, k, v, ends, ends, 20, 20)
        out.sum().backward()
        out, _ = cute_mla.flash_attn_varlen_func(q, k, v, ends, ends, 20, 20)
        out.float().sum(0, keepdim=True).expand(3, -1, -1).sum().backward()
    assert len(device.launches) == 6


def test_gradients_of_fp16_are_refused_before_the_forward_pass_returns() -> None:
    q, k, v = (torch.zeros(20, 2, columns, dtype=torch.float16, requires_grad=True) for columns in (192, 192, 128))
    ends = torch.tensor([0, 20], dtype=torch.int32)
    with (
        RecordingDevice(SM90).active(),
        pytest.raises(ValueError, match=r"torch.float16 and a gradient is needed; .*\.to\(torch.bfloat16\)"),
    ):
        cute_mla.flash_attn_varlen_func(q, k, v, ends, ends, 20, 20)
