"""The drop-in module: FlashMLA's names, orders, schedule object and conventions, in its forms of 2026 and of 2025."""

from __future__ import annotations

import inspect
import math
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

import cute_mla
from cute_mla import flash_mla, reference
from cute_mla.flash_mla import FlashMLASchedMeta, flash_mla_interface, form_a
from cute_mla.ops.split_plan import MlaSchedule
from cute_mla.spec.arch import SM90, Arch
from cute_mla.spec.mla import LOG2E
from tests.support.recording_device import RecordingDevice
from tests.support.right_calls import RightCall, call_of, planned, sparse_call
from tests.support.tree import ROOT
from tests.support.zero_tensors import ints

NEWER: Any = flash_mla  # called by position, and with arguments of wrong types
OLDER: Any = form_a
NEEDED = inspect.Parameter.empty
DECODE = {
    **dict.fromkeys(("q", "k_cache", "block_table", "cache_seqlens", "head_dim_v", "tile_scheduler_metadata"), NEEDED),
    "num_splits": None,
    "softmax_scale": None,
    "causal": False,
    "is_fp8_kvcache": False,
    "indices": None,
}
PREFILL = {"q": NEEDED, "kv": NEEDED, "indices": NEEDED, "sm_scale": NEEDED, "d_v": 512}
ENDS = dict.fromkeys(("cu_seqlens_qo", "cu_seqlens_kv", "max_seqlen_qo", "max_seqlen_kv"), NEEDED)
OPTIONS = {"dropout_p": 0.0, "softmax_scale": None, "causal": False, "deterministic": False, "is_varlen": True}
VARLEN = {
    "flash_attn_varlen_func": {"q": NEEDED, "k": NEEDED, "v": NEEDED, **ENDS, **OPTIONS},
    "flash_attn_varlen_kvpacked_func": {"q": NEEDED, "kv": NEEDED, **ENDS, "head_dim_qk": NEEDED, **OPTIONS},
    "flash_attn_varlen_qkvpacked_func": {**dict.fromkeys(("qkv", "cu_seqlens", "max_seqlen", "head_dim_qk"), NEEDED), **OPTIONS},
}
FORM_B: dict[str, dict[str, Any]] = {
    "flash_mla_with_kvcache": {
        **DECODE,
        **dict.fromkeys(("attn_sink", "extra_k_cache", "extra_indices_in_kvcache", "topk_length", "extra_topk_length")),
        "enable_batch_invariant": False,
    },
    "flash_mla_sparse_fwd": {**PREFILL, "attn_sink": None, "topk_length": None, "indexer_topk": 0},
    **VARLEN,
}
FORM_A: dict[str, dict[str, Any]] = {
    "get_mla_metadata": {
        **dict.fromkeys(("cache_seqlens", "num_q_tokens_per_head_k", "num_heads_k"), NEEDED),
        "num_heads_q": None,
        "is_fp8_kvcache": False,
        "topk": None,
    },
    "flash_mla_with_kvcache": {**DECODE, "num_splits": NEEDED},
    "flash_mla_sparse_fwd": PREFILL,
    **VARLEN,
}
SIGNATURES = [(module, name, wanted) for module, form in ((NEWER, FORM_B), (OLDER, FORM_A)) for name, wanted in form.items()]


@pytest.mark.parametrize(("module", "name", "wanted"), SIGNATURES, ids=lambda value: getattr(value, "__name__", None))
def test_signatures_are_those_of_flashmla(module: Any, name: str, wanted: dict[str, Any]) -> None:
    parameters = inspect.signature(getattr(module, name)).parameters.values()
    assert [(parameter.name, parameter.default) for parameter in parameters] == list(wanted.items())
    assert {parameter.kind for parameter in parameters} == {inspect.Parameter.POSITIONAL_OR_KEYWORD}


def test_importing_the_module_gives_both_forms_and_its_interface() -> None:
    script = "import cute_mla.flash_mla as m; print(m.form_a.__name__, m.flash_mla_interface.FlashMLASchedMeta.__name__)"
    printed = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    assert printed == ["cute_mla.flash_mla.form_a", "FlashMLASchedMeta"]
    for name in (*FORM_B, "get_mla_metadata"):
        assert getattr(flash_mla, name) is getattr(flash_mla_interface, name)
        assert name in form_a.__all__


def test_metadata_ignores_its_arguments_and_needs_no_device() -> None:
    lengths = torch.zeros(2, dtype=torch.int32)
    for arguments, options in (((), {}), ((lengths, 64, 1, 64, True, 128), {}), ((None, 7), {"topk": "all"})):
        schedule, num_splits = NEWER.get_mla_metadata(*arguments, **options)
        assert type(schedule) is FlashMLASchedMeta
        assert isinstance(schedule, MlaSchedule)
        assert num_splits is None


def dense_arguments(call: RightCall, *options: Any) -> tuple[Any, ...]:
    """Return the arguments of a dense call by position, up to any options behind the schedule."""
    front = (call[name] for name in ("q", "k_cache", "block_table", "cache_seqlens", "head_dim_v"))
    return *front, *NEWER.get_mla_metadata(), *options


def dense_call(*options: Any, **named: Any) -> Any:
    """Call dense decode by position, up to any options behind the schedule."""
    return NEWER.flash_mla_with_kvcache(*dense_arguments(call_of("dense"), *options), **named)


def sparse_arguments(call: RightCall) -> tuple[Any, ...]:
    """Return the arguments of a sparse call by position, up to the schedule."""
    return call["q"], call["k_cache"], None, None, 512


def sparse_options(call: RightCall, *left_out: str) -> dict[str, Any]:
    """Return the arguments of a sparse call that FlashMLA's newest form takes by name, but for some."""
    names = ("is_fp8_kvcache", "indices", "extra_k_cache", "extra_indices_in_kvcache")
    return {name: call[name] for name in names if name not in left_out}


def given_by_name(device: RecordingDevice, call: Callable[[], Any], kernel: str) -> dict[str, Any]:
    """Run a call; return the arguments of its launch of a kernel, but for results and plan, which every call makes anew."""
    before = len(device.launches)
    call()
    (launch,) = (launch for launch in device.launches[before:] if launch.kernel.startswith(kernel))
    made = ("out", "lse", "out_accum", "lse_accum", "plan", "num_splits")
    return {name: getattr(value, "data_ptr", lambda value=value: value)() for name, value in launch.args.items() if name not in made}


def test_dense_decode_by_position(arch: Arch) -> None:
    call = call_of("dense", s_q=2)
    with RecordingDevice(arch).active() as device:
        main = given_by_name(device, lambda: call.run(softmax_scale=0.25, causal=True), "dense_decode")
        theirs = given_by_name(device, lambda: NEWER.flash_mla_with_kvcache(*dense_arguments(call, 0.25, True, False)), "dense_decode")
        plan = OLDER.get_mla_metadata(call["cache_seqlens"], 128, 1)
        arguments = (*dense_arguments(call)[:5], *plan, 0.25, True, False, None)
        older = given_by_name(device, lambda: OLDER.flash_mla_with_kvcache(*arguments), "dense_decode")
    assert main == theirs == older
    assert main["mask"] == 1


def test_sparse_decode_by_position(arch: Arch) -> None:
    call = sparse_call(extra_topk=64)
    indices, extra, extra_indices = (call[name] for name in ("indices", "extra_k_cache", "extra_indices_in_kvcache"))
    sink, lengths, extra_lengths = torch.zeros(64), ints(2), ints(2)
    front = sparse_arguments(call)
    with RecordingDevice(arch).active() as device:
        options = {"softmax_scale": 0.25, "attn_sink": sink, "topk_length": lengths, "extra_topk_length": extra_lengths}
        main = given_by_name(device, lambda: call.run(**options), "sparse_decode")
        rest = (0.25, False, True, indices, sink, extra, extra_indices, lengths, extra_lengths)
        arguments = (*front, *NEWER.get_mla_metadata(), *rest)
        theirs = given_by_name(device, lambda: NEWER.flash_mla_with_kvcache(*arguments), "sparse_decode")
        alone = {"extra_k_cache": None, "extra_indices_in_kvcache": None, **planned(cute_mla.get_mla_metadata())}
        one = given_by_name(device, lambda: call.run(**alone), "sparse_decode")
        plan = OLDER.get_mla_metadata(lengths, 64, 1, 64, True, 128)
        older = given_by_name(device, lambda: OLDER.flash_mla_with_kvcache(*front, *plan, None, False, True, indices), "sparse_decode")
    assert main == theirs
    assert main["indices"] == indices.data_ptr()
    assert one == older


@pytest.mark.parametrize(("extra", "kernels"), [(None, "v41"), (528, "v41"), (288, "v41_fp4")])
def test_a_cache_of_528_bytes_is_that_of_the_newest_flashmla(extra: int | None, kernels: str) -> None:
    call = sparse_call(cache="v41")
    options = sparse_options(call)
    if extra is not None:
        options["extra_k_cache"] = torch.zeros(20, 2, 1, extra, dtype=torch.float8_e4m3fn)
        options["extra_indices_in_kvcache"] = ints(2, 1, 64)
    with RecordingDevice(SM90).active() as device:
        NEWER.flash_mla_with_kvcache(*sparse_arguments(call), FlashMLASchedMeta(), **options)
    (launch,) = (launch for launch in device.launches if launch.kernel.startswith("sparse_decode"))
    assert launch.kernel == f"sparse_decode_sm90_bf16_{kernels}_cluster1"
    assert (launch.args["row_stride"], launch.args["extra_row_stride"]) == (528, extra or 0)


@pytest.mark.parametrize("invariant", [False, True])
def test_a_call_of_form_c_needs_no_flag_and_takes_enable_batch_invariant(invariant: bool, arch: Arch) -> None:
    call = sparse_call(cache="v41")
    options, schedule = sparse_options(call, "is_fp8_kvcache"), FlashMLASchedMeta()
    arguments = (*sparse_arguments(call), schedule)
    with RecordingDevice(arch).active() as device:
        main = given_by_name(device, lambda: call.run(batch_invariant=invariant), "sparse_decode")
        other = given_by_name(device, lambda: call.run(batch_invariant=not invariant), "sparse_decode")
        given = {**options, "enable_batch_invariant": invariant}
        theirs = given_by_name(device, lambda: NEWER.flash_mla_with_kvcache(*arguments, **given), "sparse_decode")
    assert theirs == main != other
    assert schedule.config == FlashMLASchedMeta.Config(2, 1, 64, 64, 1, False, True, 128, None, None, invariant)


def test_the_attributes_of_the_schedule_object() -> None:
    call = call_of("dense", s_q=2)
    with RecordingDevice().active() as device:
        arguments = dense_arguments(call, None, True)
        schedule = arguments[5]
        assert (schedule.have_initialized, schedule.config, schedule.tile_scheduler_metadata, schedule.num_splits) == (False, *[None] * 3)
        NEWER.flash_mla_with_kvcache(*arguments)
        assert schedule.have_initialized
        assert schedule.config == FlashMLASchedMeta.Config(2, 2, 64, 64, 1, True, False, None, None, None, False)
        assert schedule.tile_scheduler_metadata.shape == (66, 8)
        assert schedule.num_splits.shape == (3,)
        NEWER.flash_mla_with_kvcache(*arguments[:8], False)  # another causal: the plan is the same
        assert [launch.kernel.startswith("split_plan") for launch in device.launches].count(True) == 1
        with pytest.raises(ValueError, match=r"tile_scheduler_metadata was planned for other shapes: s_q 1 after 2"):
            NEWER.flash_mla_with_kvcache(*dense_arguments(call_of("dense", s_q=1))[:5], schedule)


def test_the_config_of_a_sparse_call() -> None:
    call = sparse_call(extra_topk=32)
    schedule = FlashMLASchedMeta()
    with RecordingDevice().active():
        NEWER.flash_mla_with_kvcache(*sparse_arguments(call), schedule, **sparse_options(call))
    assert schedule.config == FlashMLASchedMeta.Config(2, 1, 64, 64, 1, False, True, 128, 2, 32, False)


@pytest.mark.parametrize(("name", "value"), [("have_initialized", False), ("tile_scheduler_metadata", None), ("num_splits", None)])
def test_a_discarded_plan_is_made_again(name: str, value: bool | None) -> None:
    with RecordingDevice().active() as device:
        arguments = dense_arguments(call_of("dense"))
        NEWER.flash_mla_with_kvcache(*arguments)
        setattr(arguments[5], name, value)
        assert (arguments[5].have_initialized, arguments[5].config) == (False, None)
        NEWER.flash_mla_with_kvcache(*dense_arguments(call_of("dense", s_q=2))[:5], arguments[5])
    assert [launch.kernel.startswith("split_plan") for launch in device.launches].count(True) == 2
    assert arguments[5].config.s_q == 2
    with pytest.raises(ValueError, match=f"{name} is set to .*supported: {value}, which discards the plan"):
        setattr(FlashMLASchedMeta(), name, torch.zeros(1) if value is None else True)


def test_a_call_that_fails_leaves_the_schedule_unused() -> None:
    with RecordingDevice().active():
        arguments = dense_arguments(call_of("dense"))
        with pytest.raises(ValueError, match="head_dim_v is 576; supported: 512"):
            NEWER.flash_mla_with_kvcache(*arguments[:4], 576, arguments[5])
    assert (arguments[5].have_initialized, arguments[5].config) == (False, None)


def without_flag() -> Any:
    """Call sparse decode over 656 bytes a token without is_fp8_kvcache, which form B needs there."""
    call = sparse_call()
    return NEWER.flash_mla_with_kvcache(*sparse_arguments(call), FlashMLASchedMeta(), indices=call["indices"])


ERRORS: list[tuple[str, Callable[[], Any], str]] = [
    ("flag", lambda: dense_call(None, False, 1), "^is_fp8_kvcache is 1; supported: True"),
    ("no flag", without_flag, "^is_fp8_kvcache is False with k_cache of torch.uint8 and 656 columns; supported: True"),
    ("invariant", lambda: dense_call(enable_batch_invariant=2), "^enable_batch_invariant is 2"),
    ("indices", lambda: dense_call(None, False, False, 3), "^indices is 3; supported"),
    (
        "plan", lambda: NEWER.flash_mla_with_kvcache(*dense_arguments(call_of("dense"))[:5], None),
        "^tile_scheduler_metadata is NoneType, num_spl",
    ),
    ("scale", lambda: OLDER.flash_mla_sparse_fwd(*list(call_of("sparse_prefill").values())[:3], 0.0), "^sm_scale is 0.0; supp"),
    ("ends", lambda: NEWER.flash_attn_varlen_func(*varlen_arguments()[:3], None, *varlen_arguments()[4:]), "^cu_seqlens_qo is None; "),
    ("longest", lambda: NEWER.flash_attn_varlen_func(*varlen_arguments()[:6], -1), "^max_seqlen_kv is -1; supported: an integer"),
    ("flags", lambda: NEWER.flash_attn_varlen_func(*varlen_arguments(), deterministic=None), "^deterministic is None; supported: True"),
    ("varlen", lambda: NEWER.flash_attn_varlen_func(*varlen_arguments(), is_varlen=3), "^is_varlen is 3; supported: True and False"),
    ("no tensor", lambda: NEWER.flash_attn_varlen_func(None, *varlen_arguments()[1:]), "^q is None; supported: a torch tensor"),
    ("packed", lambda: NEWER.flash_attn_varlen_qkvpacked_func(torch.zeros(3, 2), None, 3, 192), r"^qkv has shape \[3, 2\]; supported"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "message"), [case[1:] for case in ERRORS], ids=[case[0] for case in ERRORS])
def test_errors_name_what_the_caller_wrote(call: Callable[[], Any], message: str) -> None:
    with RecordingDevice().active() as device, pytest.raises(ValueError, match=message):
        call()
    assert device.launches == []


@pytest.mark.parametrize(("fp8", "indices"), [(False, None), (True, ints(2, 1, 64))])
def test_flashmlas_order_is_explained_where_another_holds(fp8: bool, indices: torch.Tensor | None) -> None:
    with (
        RecordingDevice().active(),
        pytest.raises(ValueError, match=f"descale_q is {fp8}; .*by name, or import cute_mla.fl"),
    ):
        cute_mla.flash_mla_with_kvcache(*dense_arguments(call_of("dense"), None, False, fp8, indices))


def varlen_arguments() -> tuple[Any, ...]:
    """Return the arguments of a dense prefill call by position."""
    return tuple(call_of("dense_prefill").values())[:7]


def test_the_lse_of_dense_prefill_lies_as_flashmlas(arch: Arch) -> None:
    q, k, v, ends, *_ = varlen_arguments()
    packed = torch.zeros(300, 2, 512, dtype=torch.bfloat16)
    calls: dict[str, tuple[Any, ...]] = {
        "flash_attn_varlen_func": (q, k, v, ends, ends, 290, 290, 0.0, 0.25, True, False, False),
        "flash_attn_varlen_kvpacked_func": (q, torch.cat((k, v), -1), ends, ends, 290, 290, 192, 0.0, 0.25, True, False, False),
        "flash_attn_varlen_qkvpacked_func": (packed, ends, 290, 192, 0.0, 0.25, True, False, False),
    }
    assert set(calls) == set(VARLEN)
    for name, arguments in calls.items():
        with RecordingDevice(arch).active() as device:
            _, lse = getattr(flash_mla, name)(*arguments)
        assert lse.stride() == (1, 300)
        (launch,) = device.launches
        assert launch.args["lse"] is lse
        assert (launch.args["causal"], launch.args["empty_lse"]) == (1, -math.inf)
        assert launch.args["scale_log2"] == pytest.approx(0.25 * LOG2E)


def test_the_older_sparse_prefill_has_logarithms_to_base_2(arch: Arch) -> None:
    """One token attends to nothing: its lse is -inf in the older form and +inf in the newer one."""
    draw = torch.Generator().manual_seed(1)
    q = torch.randn(2, 3, 576, generator=draw).to(torch.bfloat16)
    kv = torch.randn(5, 1, 576, generator=draw).to(torch.bfloat16)
    indices = torch.tensor([[[0, 4, -1, 5]], [[-1, 7, -3, 1 << 30]]], dtype=torch.int32)
    with cute_mla.simulate(arch, 2):
        out, max_logits, lse = OLDER.flash_mla_sparse_fwd(q, kv, indices, 0.125)
        newer = NEWER.flash_mla_sparse_fwd(q, kv, indices, 0.125)
    assert torch.equal(out, newer[0])
    _, expected_max, expected_lse = reference.sparse_prefill(q, kv, indices, 0.125)
    for row, expected in ((max_logits, expected_max), (lse, expected_lse)):
        torch.testing.assert_close(row[0], expected[0] * LOG2E, rtol=2.01 / 65536, atol=1e-6)
    assert (max_logits[1] == -math.inf).all()
    assert (lse[1] == -math.inf).all()
    assert (newer[2][1] == math.inf).all()
    torch.testing.assert_close(newer[2][0], expected_lse[0], rtol=2.01 / 65536, atol=1e-6)


def test_sparse_prefill_returns_the_lse_of_the_indexer_fourth(arch: Arch) -> None:
    """By position, in natural log, +inf where none of its indices names a row; indexer_topk 0 leaves three results."""
    draw = torch.Generator().manual_seed(1)
    q = torch.randn(2, 3, 576, generator=draw).to(torch.bfloat16)
    kv = torch.randn(5, 1, 576, generator=draw).to(torch.bfloat16)
    indices = torch.tensor([[[0, -1, 4, 3]], [[-1, 7, 1, 2]]], dtype=torch.int32)
    with cute_mla.simulate(arch, 2):
        results = NEWER.flash_mla_sparse_fwd(q, kv, indices, 0.125, 512, None, None, 2)
        assert len(NEWER.flash_mla_sparse_fwd(q, kv, indices, 0.125, 512, None, None, 0)) == 3
    assert [result.shape for result in results] == [(2, 3, 512), *[(2, 3)] * 3]
    expected = (q[0].double() @ kv[0, 0].double()).float() * 0.125  # the one row among the first two indices of token 0
    torch.testing.assert_close(results[3][0], expected, rtol=2.01 / 65536, atol=1e-6)
    assert (results[3][1] == math.inf).all()
    assert results[2].isfinite().all()
