"""The ops of torch that stand for the public functions while they are traced: torch's own checks of them, and who calls them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

import cute_mla
import cute_mla.cache
import cute_mla.torch_ops  # which makes them
from cute_mla.spec.arch import Arch
from cute_mla.testing.operations.sparse_decode.case import Pool
from tests.support.public_calls import calls_of
from tests.support.recording_device import RecordingDevice
from tests.support.right_calls import call_of, with_own_memory
from tests.support.zero_tensors import ints

OPS = torch.ops.cute_mla
_PAIR: dict[str, Any] = {"lengths": ((3, 70), (2, 1)), "h_kv": 1, "group": 2, "causal": True}
_SPARSE: dict[str, Any] = {"s_q": 2, "h_q": 3, "s_kv": 90, "sinks": "drawn"}
_CACHES: dict[str, Any] = {"h_q": 3, "main": Pool(80, 70, lengths="drawn"), "extra": Pool(9, 5)}
_PAGES: dict[str, Any] = {"heads": 9, "keys": 70, "page_size": 64, "lengths": "edges"}
_CACHED: dict[str, Any] = {"cache": "fp8_656", "scale_of_cache": None}
# An op's name, a right call, and fields of its case.
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "dense": ("flash_mla_with_kvcache", "dense", {"s_q": 2, "lengths": (70, 0), "h_q": 3, "causal": True, "metadata": "tensors"}),
    "fp8": (
        "flash_mla_with_kvcache",
        "dense_fp8",
        {"batch": 1, "lengths": (40,), "h_q": 2, "metadata": "tensors", "empty_lse": float("-inf")},
    ),
    "sparse": ("flash_mla_with_kvcache", "sparse", {**_CACHES, "sinks": "drawn", "metadata": "tensors"}),
    "sparse_prefill": ("flash_mla_sparse_fwd", "sparse_prefill", _SPARSE),
    "indexer_prefill": ("flash_mla_sparse_fwd_indexer", "sparse_prefill", {**_SPARSE, "indexer_topk": 7}),
    "dense_prefill": ("flash_attn_varlen_func", "dense_prefill", _PAIR),
    "masked_prefill": ("flash_attn_varlen_masked", "dense_prefill", {**_PAIR, "mask": "edges"}),
    "dense_prefill_backward": ("flash_attn_varlen_backward", "backward", _PAIR),
    "merge": ("merge_states", "merge", {"states": 2, "form": "listed"}),
    "merge_stacked": ("merge_states", "merge", {"states": 2}),
    "logits": ("fp8_mqa_logits", "row_logits", {"heads": 9, "tokens": 2, "keys": 70}),
    "paged_logits": ("fp8_paged_mqa_logits", "paged_logits", _PAGES),
    "chosen": ("indexer_topk_prefill", "indexer_topk_prefill", {"heads": 9, "tokens": 2, "keys": 70, "topk": 40}),
    "paged_chosen": ("indexer_topk", "indexer_topk", {**_PAGES, "topk": 40}),
    "topk": ("topk_indices", "topk", {"rows": 2, "columns": 300, "topk": 20, "lengths": "edges"}),
    "index_keys": ("write_index_cache", "index_write", {"hadamard": True}),
    "index_queries": ("prepare_index_queries", "index_queries", {"hadamard": True}),
    "write": ("write_kv_cache", "write", {**_CACHED, "power_of_two": True}),
    "insert": ("insert_kv_cache", "insert", {**_CACHED, "power_of_two": True, "position_type": "in_order"}),
    "gather": ("gather_kv_cache", "gather", {**_CACHED, "starts": None}),
}
RESULTS = ("out", "out_weights", "max_logits", "lse", "lse_indexer", "workspace")
GRADIENTS = ("dq", "dk", "dv", "workspace")
Call = tuple[str, dict[str, Any]]  # an op's name and its arguments


def op_call(op: str, kind: str, fields: dict[str, Any]) -> Call:
    """Return an op and its arguments in a right call, without results."""
    given = with_own_memory(call_of(kind, **fields))
    if isinstance(given.get("kv"), tuple):
        given["keys"], given["scales"] = given["kv"]
    if op == "merge_states":
        given["stacked"] = isinstance(given["outs"], Tensor)
        given |= {name: [given[name]] for name in ("outs", "lses") if given["stacked"]}
    names = [argument.name for argument in getattr(OPS, op).default._schema.arguments]
    return op, {name: given[name] for name in names if name in given}


def results_of(function: str) -> tuple[str, ...]:
    """Return the arguments of a public function that it writes to."""
    return GRADIENTS if function == "flash_attn_varlen_backward" else RESULTS


def sparse_plan_call() -> Call:
    """Return the plan of a schedule object for sparse decode."""
    lengths = torch.tensor([70, 3], dtype=torch.int32)
    return "plan_sparse_decode", {"indices": ints(2, 1, 70), "num_heads_q": 4, "topk_length": lengths, "extra_indices": ints(2, 1, 70)}


def plan_call() -> Call:
    """Return a plan for dense decode."""
    return "get_mla_metadata", {"cache_seqlens": torch.tensor([70, 3], dtype=torch.int32), "num_q_tokens_per_head_k": 8, "num_heads_k": 1}


def sparse_gradients_call() -> Call:
    """Return the backward of sparse prefill."""
    (given,) = calls_of("flash_mla_sparse_bwd")
    left_out = ("dq", "dkv", "d_sink", "dkv_accumulate")
    return "flash_mla_sparse_bwd", {name: value for name, value in given.items() if name not in left_out}


def training_call(name: str) -> Call:
    """Return a call of a function that trains an indexer, which allocates its results."""
    (given,) = calls_of(name)
    left_out = ("out", "dq", "dk", "dweights", "dk_accumulate")
    return name, {key: value for key, value in given.items() if key not in left_out}


CALLS: dict[str, Callable[[], Call]] = {
    **{name: partial(op_call, *case) for name, case in CASES.items()},
    "plan": plan_call,
    "plan_topk": lambda: ("get_mla_metadata", plan_call()[1] | {"num_heads_q": 8, "topk": 70}),
    "plan_sparse": sparse_plan_call,
    "sparse_backward": sparse_gradients_call,
    **{
        name: partial(training_call, name) for name in ("attention_head_sums", "indexer_scores", "indexer_backward", "plan_sparse_backward")
    },
}
_E4M3 = ("fp8", "logits", "paged_logits", "chosen", "paged_chosen", "index_queries")  # calls with e4m3 operands
SLOW = ("sparse", "sparse_prefill", "indexer_prefill", "merge_stacked")
WITH_RESULTS = [
    pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in CASES if name not in ("index_keys", "write", "insert")
]


def given_results(name: str, arguments: dict[str, Any]) -> dict[str, Tensor]:
    """Return tensors for an op to write its results to, and a workspace where it takes one."""
    names = [argument.name for argument in getattr(OPS, f"{name}_out").default._schema.arguments if argument.name in results_of(name)]
    made = getattr(OPS, name)(**arguments)
    made = (made,) if isinstance(made, Tensor) else made
    results = dict(zip([key for key in names if key != "workspace"], map(torch.zeros_like, made), strict=True))
    return results | {key: torch.zeros(1 << 16, dtype=torch.uint8) for key in names if key == "workspace"}


@pytest.fixture
def device() -> Iterator[RecordingDevice]:
    with RecordingDevice(sm_count=8).active() as device:
        yield device


def check_op(name: str, op: Any, arguments: dict[str, Any]) -> None:
    """All that torch checks of an op; but for e4m3 tensors the check of its schema, which cannot compare these."""
    utils = ["test_schema"] * (name not in _E4M3) + ["test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    torch.library.opcheck(op, (), arguments, test_utils=utils)


def somewhere(name: str) -> AbstractContextManager[Any]:
    """Activate the device of a call. Keys are written and gathered on the CPU, too."""
    return nullcontext() if name in ("write", "insert", "gather") else cute_mla.simulate("sm90", 2)


def test_schemas_are_the_recorded_ones() -> None:
    """Saved programs name them: torch_schemas.txt is edited by hand."""
    names = {schema.name for schema in torch._C._jit_get_all_schemas() if schema.name.startswith("cute_mla::")}
    schemas = [str(getattr(OPS, name.partition("::")[2]).default._schema) for name in sorted(names)]
    assert schemas == Path(__file__).with_name("torch_schemas.txt").read_text().splitlines()


@pytest.mark.parametrize("name", CALLS)
def test_torch_finds_no_fault_with_an_op(name: str) -> None:
    with somewhere(name):
        op, arguments = CALLS[name]()
        check_op(name, getattr(OPS, op).default, arguments)


@pytest.mark.parametrize("name", WITH_RESULTS)
def test_torch_finds_no_fault_with_an_op_that_writes_to_tensors_of_the_caller(name: str) -> None:
    with somewhere(name):
        op, arguments = CALLS[name]()
        check_op(name, getattr(OPS, f"{op}_out").default, arguments | given_results(op, arguments))


@pytest.mark.parametrize("name", ["plan", "plan_topk", "plan_sparse"])
def test_fakes_know_how_many_parts_a_plan_has(arch: Arch, name: str) -> None:
    op, arguments = CALLS[name]()
    with RecordingDevice(arch, sm_count=37).active():
        real = getattr(OPS, op)(**arguments)
        with FakeTensorMode(allow_non_fake_inputs=True):
            fake = getattr(OPS, op)(**arguments)
    assert [tensor.shape for tensor in fake] == [tensor.shape for tensor in real]


def public_call(name: str) -> tuple[Callable[..., Any], dict[str, Any]]:
    """Return the public function that an op of attention stands for, and the same arguments."""
    op, arguments = CALLS[name]()
    return getattr(cute_mla, op.removesuffix("_indexer")), arguments


def test_fake_tensors_outside_their_mode_become_ops(device: RecordingDevice) -> None:
    function, arguments = public_call("dense")
    device.launches.clear()
    mode = FakeTensorMode()
    fakes = {key: mode.from_tensor(value) if isinstance(value, Tensor) else value for key, value in arguments.items()}
    out, lse = function(**fakes)
    assert (out.shape, lse.shape) == ((2, 2, 3, 512), (2, 3, 2))
    assert device.launches == []


FLOATS = {"dense": "q", "sparse": "attn_sink", "indexer_prefill": "q"}


@pytest.mark.parametrize("name", FLOATS)
def test_gradients_are_refused_by_name(device: RecordingDevice, name: str) -> None:
    function, arguments = public_call(name)
    op = getattr(OPS, CALLS[name]()[0])
    function(**arguments)
    launches = len(device.launches)
    arguments[FLOATS[name]].requires_grad_()
    for call in (function, op):
        with pytest.raises(
            ValueError, match=f"^{FLOATS[name]} requires grad; supported: (the forward pass only|gradients of calls without indexer_topk)"
        ):
            call(**arguments)
    assert len(device.launches) == launches
    with torch.no_grad():
        function(**arguments)
        op(**arguments)
    with pytest.raises(ValueError, match="requires grad"):  # although this call was right a moment ago
        function(**arguments)


@pytest.mark.parametrize("state", ["outs", "lses"])
def test_gradients_of_states_are_refused(device: RecordingDevice, state: str) -> None:
    _, arguments = CALLS["merge"]()
    arguments[state][1].requires_grad_()
    with pytest.raises(ValueError, match=rf"^{state}\[1\] requires grad"):
        cute_mla.merge_states(arguments["outs"], arguments["lses"])
    with pytest.raises(ValueError, match=f"^{state} requires grad"):
        OPS.merge_states(**arguments)


def test_a_schedule_object_is_planned_for_sparse_decode_as_without_an_op() -> None:
    call = call_of("sparse", **_CACHES)
    with cute_mla.simulate("sm90", 5):
        schedule = call["tile_scheduler_metadata"]
        call.run()
        named = ("topk_length", "extra_indices_in_kvcache", "extra_topk_length")
        plan = OPS.plan_sparse_decode(call["indices"], 3, *(call[name] for name in named))
    assert all(torch.equal(mine, its) for mine, its in zip(plan, (schedule.tile_scheduler_metadata, schedule.num_splits), strict=True))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"topk_length": torch.zeros(1, dtype=torch.int32)}, r"topk_length has shape \[1\]; supported: \[2\]"),
        ({"topk_length": torch.zeros(2, dtype=torch.int64)}, "topk_length has dtype torch.int64"),
        ({"indices": torch.zeros(2, 1, 70)}, "indices has dtype torch.float32"),
        ({"extra_indices": torch.zeros(3, 1, 5, dtype=torch.int32)}, r"extra_indices_in_kvcache has shape \[3, 1, 5\]"),
    ],
)
def test_what_a_plan_for_sparse_decode_reads_is_checked(device: RecordingDevice, change: dict[str, Tensor], message: str) -> None:
    _, arguments = sparse_plan_call()
    with pytest.raises(ValueError, match=message):
        OPS.plan_sparse_decode(**(arguments | change))
    assert device.launches == []
