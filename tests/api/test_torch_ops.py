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
from cute_mla.testing.cases.base import BaseCase
from cute_mla.testing.cases.dense_decode import DenseDecodeCase
from cute_mla.testing.cases.dense_prefill import DensePrefillCase
from cute_mla.testing.cases.dense_prefill_backward import DensePrefillBackwardCase
from cute_mla.testing.cases.sparse_decode import Pool, SparseDecodeCase
from cute_mla.testing.cases.sparse_prefill import SparsePrefillCase
from cute_mla.testing.operations import operation
from tests.support.recording_device import RecordingDevice

OPS = torch.ops.cute_mla
PUBLIC = {
    "dense_decode": "flash_mla_with_kvcache",
    "sparse_decode": "flash_mla_with_kvcache",
    "sparse_prefill": "flash_mla_sparse_fwd",
    "dense_prefill": "flash_attn_varlen_func",
    "dense_prefill_backward": "flash_attn_varlen_backward",
}
CASES: dict[str, BaseCase] = {
    "dense": DenseDecodeCase(batch=2, s_q=2, lengths=(70, 0), h_q=3, causal=True, metadata="tensors"),
    "fp8": DenseDecodeCase(batch=1, lengths=(40,), h_q=2, operands="fp8", metadata="tensors", empty_lse=float("-inf")),
    "sparse": SparseDecodeCase(batch=2, h_q=3, main=Pool(80, 70, lengths="drawn"), extra=Pool(9, 5), sinks="drawn", metadata="tensors"),
    "sparse_prefill": SparsePrefillCase(s_q=2, h_q=3, s_kv=90, sinks="drawn"),
    "indexer_prefill": SparsePrefillCase(s_q=2, h_q=3, s_kv=90, sinks="drawn", indexer_topk=7),
    "dense_prefill": DensePrefillCase(lengths=((3, 70), (2, 1)), group=2, causal=True),
    "masked_prefill": DensePrefillCase(lengths=((3, 70), (2, 1)), group=2, causal=True, mask="edges"),
    "dense_prefill_backward": DensePrefillBackwardCase(lengths=((3, 70), (2, 1)), group=2, causal=True),
}
RESULTS = ("out", "out_weights", "max_logits", "lse", "lse_indexer", "workspace")
GRADIENTS = ("dq", "dk", "dv", "workspace")
Call = tuple[str, dict[str, Any]]  # an op's name and its arguments


def call_of(case: BaseCase) -> Call:
    """Return the op of a case, and its arguments without results."""
    op = operation(case)
    arguments = op.arguments(case, op.make_tensors(case, "cpu"), None)
    if isinstance(case, DensePrefillCase):  # no row without a sequence, for those are not written
        arguments["cu_seqlens_qo"][0], arguments["cu_seqlens_qo"][-1] = 0, arguments["q"].shape[0]
        arguments["max_seqlen_qo"] = arguments["q"].shape[0]
    name = "flash_attn_varlen_masked" if "key_mask" in arguments else PUBLIC[case.op]
    if isinstance(case, SparsePrefillCase):
        name += "_indexer" if case.indexer_topk else ""
        arguments = {key: value for key, value in arguments.items() if key != "indexer_topk" or case.indexer_topk}
    return name, {key: value for key, value in arguments.items() if key not in results_of(name)}


def results_of(function: str) -> tuple[str, ...]:
    """Return the arguments of a public function that it writes to."""
    return GRADIENTS if function == "flash_attn_varlen_backward" else RESULTS


def merge_call(stacked: bool = False) -> Call:
    """merge_states of two states."""
    outs = list(torch.randn(2, 3, 2, 128, dtype=torch.bfloat16, generator=torch.Generator().manual_seed(0)))
    lses = list(torch.randn(2, 3, 2, generator=torch.Generator().manual_seed(1)))
    if stacked:
        outs, lses = [torch.stack(outs)], [torch.stack(lses)]
    return "merge_states", {"outs": outs, "lses": lses, "stacked": stacked}


def sparse_plan_call() -> Call:
    """Return the plan of a schedule object for sparse decode."""
    indices = torch.zeros(2, 1, 70, dtype=torch.int32)
    lengths = torch.tensor([70, 3], dtype=torch.int32)
    return "plan_sparse_decode", {"indices": indices, "num_heads_q": 4, "topk_length": lengths, "extra_indices": indices}


def plan_call() -> Call:
    """Return a plan for dense decode."""
    return "get_mla_metadata", {"cache_seqlens": torch.tensor([70, 3], dtype=torch.int32), "num_q_tokens_per_head_k": 8, "num_heads_k": 1}


def write_call() -> Call:
    """Return a call that writes one key to a slot and another to none."""
    kv_c, k_pe = (torch.randn(2, columns, dtype=torch.bfloat16, generator=torch.Generator().manual_seed(columns)) for columns in (512, 64))
    cache = torch.zeros(2, 16, 1, 656, dtype=torch.uint8)
    return "write_kv_cache", {"kv_c": kv_c, "k_pe": k_pe, "k_cache": cache, "slot_mapping": torch.tensor([17, -1]), "power_of_two": True}


def gather_call() -> Call:
    """Return a call that gathers keys of two requests."""
    cache = torch.randint(0, 100, (3, 16, 1, 656), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    cu_seqlens = torch.tensor([0, 2, 5], dtype=torch.int32)
    table = torch.tensor([[1], [2]], dtype=torch.int32)
    return "gather_kv_cache", {"k_cache": cache, "block_table": table, "cu_seqlens": cu_seqlens, "rows": 5, "dtype": torch.bfloat16}


def topk_call() -> Call:
    """Return a selection in two rows."""
    logits = torch.randn(2, 300, generator=torch.Generator().manual_seed(0))
    return "topk_indices", {"logits": logits, "lengths": torch.tensor([300, 7], dtype=torch.int32), "topk": 20}


def logits_call(paged: bool) -> Call:
    """Return logits of two tokens, of keys in a row or in an index cache."""
    draw = torch.Generator().manual_seed(0)
    q = torch.randint(-4, 5, (2, 1, 9, 128), generator=draw).to(torch.float8_e4m3fn)
    weights, count = torch.ones(2, 9), torch.tensor([70, 3], dtype=torch.int32)
    if not paged:
        keys = torch.randint(-4, 5, (70, 128), generator=draw).to(torch.float8_e4m3fn)
        return "fp8_mqa_logits", {"q": q[:, 0], "keys": keys, "scales": torch.ones(70), "weights": weights, "ks": count - 3, "ke": count}
    cache = torch.zeros(3, 64, 1, 132, dtype=torch.uint8)
    table = torch.tensor([[1, 2], [0, 0]], dtype=torch.int32)
    arguments = {"q": q, "cache": cache, "weights": weights, "context_lens": count, "block_table": table}
    return "fp8_paged_mqa_logits", {**arguments, "metadata": None, "max_context_len": 70}


def indexer_call(paged: bool) -> Call:
    """Return a choice of keys of the same tokens."""
    arguments = {**logits_call(paged)[1], "topk": 40}
    if not paged:
        return "indexer_topk_prefill", arguments
    del arguments["metadata"], arguments["max_context_len"]
    arguments["index_cache"] = arguments.pop("cache")
    return "indexer_topk", {**arguments, "slots": True}


def index_call(queries: bool) -> Call:
    """Return a call that writes one key of two to an index cache, or prepares two tokens' queries."""
    draw = torch.Generator().manual_seed(0)
    arguments = {"cos_sin": torch.randn(5, 64, generator=draw), "positions": torch.tensor([4, 1]), "rope": "half_split", "hadamard": True}
    if queries:
        q = torch.randn(2, 3, 128, generator=draw).bfloat16()
        return "prepare_index_queries", {"q": q, "weights": torch.ones(2, 3), **arguments}
    k, cache = torch.randn(2, 128, generator=draw).bfloat16(), torch.zeros(2, 16, 1, 132, dtype=torch.uint8)
    norm = {"norm_weight": torch.ones(128), "norm_bias": torch.zeros(128)}
    return "write_index_cache", {"k": k, "index_cache": cache, "slot_mapping": torch.tensor([17, -1]), **norm, **arguments}


def insert_call() -> Call:
    """Return a call that inserts one key of two, keeps both, and rotates their queries."""
    _, written = write_call()
    draw = torch.Generator().manual_seed(0)
    rotary = {"q_pe": torch.randn(2, 3, 64, generator=draw).bfloat16(), "cos_sin": torch.randn(5, 64, generator=draw)}
    keys = {"norm_weight": torch.ones(512).bfloat16(), "keys": torch.zeros(2, 576).bfloat16()}
    return "insert_kv_cache", {**written, **rotary, **keys}


CALLS: dict[str, Callable[[], Call]] = {
    **{name: partial(call_of, case) for name, case in CASES.items()},
    "merge": merge_call,
    "merge_stacked": lambda: merge_call(stacked=True),
    "logits": partial(logits_call, False),
    "paged_logits": partial(logits_call, True),
    "chosen": partial(indexer_call, False),
    "paged_chosen": partial(indexer_call, True),
    "topk": topk_call,
    "index_keys": partial(index_call, False),
    "index_queries": partial(index_call, True),
    "write": write_call,
    "insert": insert_call,
    "gather": gather_call,
    "plan": plan_call,
    "plan_topk": lambda: ("get_mla_metadata", plan_call()[1] | {"num_heads_q": 8, "topk": 70}),
    "plan_sparse": sparse_plan_call,
}
_E4M3 = ("fp8", "logits", "paged_logits", "chosen", "paged_chosen", "index_queries")  # calls with e4m3 operands
SLOW = ("sparse", "sparse_prefill", "indexer_prefill", "merge_stacked")
WITH_RESULTS = [
    pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW))
    for name in (*CASES, *_E4M3[1:], "merge", "merge_stacked", "topk", "gather")
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


FLOATS = {"dense": "q", "sparse": "attn_sink", "sparse_prefill": "kv", "indexer_prefill": "q"}


@pytest.mark.parametrize("name", FLOATS)
def test_gradients_are_refused_by_name(device: RecordingDevice, name: str) -> None:
    function, arguments = public_call(name)
    op = getattr(OPS, CALLS[name]()[0])
    function(**arguments)
    launches = len(device.launches)
    arguments[FLOATS[name]].requires_grad_()
    for call in (function, op):
        with pytest.raises(ValueError, match=f"^{FLOATS[name]} requires grad; supported: the forward pass only"):
            call(**arguments)
    assert len(device.launches) == launches
    with torch.no_grad():
        function(**arguments)
        op(**arguments)
    with pytest.raises(ValueError, match="requires grad"):  # although this call was right a moment ago
        function(**arguments)


@pytest.mark.parametrize("state", ["outs", "lses"])
def test_gradients_of_states_are_refused(device: RecordingDevice, state: str) -> None:
    _, arguments = merge_call()
    arguments[state][1].requires_grad_()
    with pytest.raises(ValueError, match=rf"^{state}\[1\] requires grad"):
        cute_mla.merge_states(arguments["outs"], arguments["lses"])
    with pytest.raises(ValueError, match=f"^{state} requires grad"):
        OPS.merge_states(**arguments)


def test_a_schedule_object_is_planned_for_sparse_decode_as_without_an_op() -> None:
    _, arguments = call_of(SparseDecodeCase(batch=2, h_q=3, main=Pool(80, 70, lengths="drawn"), extra=Pool(9, 5)))
    arguments.pop("num_splits")
    with cute_mla.simulate("sm90", 5):
        schedule = arguments["tile_scheduler_metadata"]
        cute_mla.flash_mla_with_kvcache(**arguments)
        named = ("topk_length", "extra_indices_in_kvcache", "extra_topk_length")
        plan = OPS.plan_sparse_decode(arguments["indices"], 3, *(arguments[name] for name in named))
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
