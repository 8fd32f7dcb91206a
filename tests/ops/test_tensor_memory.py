"""A tensor without memory is refused by name in every function, in a first call and in a repeated one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

import cute_mla
from cute_mla.cache import dequantise_cache, gather_kv_cache, insert_kv_cache, quantise_cache, write_kv_cache
from cute_mla.indexer import (
    fp8_mqa_logits,
    fp8_paged_mqa_logits,
    indexer_topk,
    prepare_index_queries,
    topk_indices,
    write_index_cache,
)
from cute_mla.ops.overlap import check_no_overlap
from cute_mla.parallel import ContextShard
from tests.support.decode_arguments import bytes_from, dense, dense_fp8, sparse_extra
from tests.support.recording_device import RecordingDevice
from tests.support.zero_tensors import ints, zeros


class Wrapper(Tensor):
    """A wrapper subclass: a shape without a storage of its own."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise AssertionError(f"{func} ran on a tensor without memory")


def wrapped(tensor: Tensor) -> Tensor:
    made: Tensor = Tensor._make_wrapper_subclass(Wrapper, tensor.shape, tensor.stride(), dtype=tensor.dtype)  # type: ignore[attr-defined]
    return made


def freed(tensor: Tensor) -> Tensor:
    """Return a tensor whose storage was freed."""
    tensor.untyped_storage().resize_(0)
    return tensor


def freed_view(tensor: Tensor) -> Tensor:
    """Return a view of a freed storage: its address is not null but its offset."""
    memory = torch.zeros(tensor.nbytes + 64, dtype=torch.uint8)
    view = memory[64:].view(tensor.dtype).view(tensor.shape)
    memory.untyped_storage().resize_(0)
    assert view.data_ptr() == 64
    return view


def shrunk(tensor: Tensor) -> Tensor:
    """Return a tensor whose storage ends before its last element."""
    tensor = tensor.clone()
    tensor.untyped_storage().resize_(tensor.nbytes - 1)
    return tensor


def fake(tensor: Tensor) -> Tensor:
    """Return a tracer's stand-in."""
    return FakeTensorMode().from_tensor(tensor)


LOST: dict[str, Callable[[Tensor], Tensor]] = {
    "freed": freed,
    "freed view": freed_view,
    "shrunk": shrunk,
    "zero tensor": lambda tensor: torch._efficientzerotensor(tensor.shape, dtype=tensor.dtype),
    "wrapper": wrapped,
    "fake": fake,
}
KEPT = [name for name in LOST if name != "shrunk"]  # a storage that was shrunk is noticed by the first call of its shapes


def sparse_prefill(**changes: Any) -> dict[str, Any]:
    arguments = {
        "q": zeros(3, 2, 576), "kv": zeros(9, 1, 576), "indices": ints(3, 1, 5), "sm_scale": 0.1, "attn_sink": torch.zeros(2),
        "topk_length": ints(3), "out": zeros(3, 2, 512), "max_logits": torch.zeros(3, 2), "lse": torch.zeros(3, 2),
        "lse_indexer": torch.zeros(3, 2), "indexer_topk": 3,
    }  # fmt: skip
    return {**arguments, **changes}


def dense_prefill(**changes: Any) -> dict[str, Any]:
    arguments = {
        "q": zeros(3, 2, 192), "k": zeros(9, 1, 192), "v": zeros(9, 1, 128), "cu_seqlens_qo": ints(2), "cu_seqlens_kv": ints(2),
        "max_seqlen_qo": 3, "max_seqlen_kv": 9, "out": zeros(3, 2, 128), "lse": torch.zeros(3, 2),
    }  # fmt: skip
    return {**arguments, **changes}


def merging(**changes: Any) -> dict[str, Any]:
    arguments = {"outs": zeros(4, 3, 2, 128), "lses": torch.zeros(4, 3, 2), "out": zeros(3, 2, 128), "lse": torch.zeros(3, 2)}
    return {**arguments, **changes}


def planning(**changes: Any) -> dict[str, Any]:
    return {"cache_seqlens": ints(3), "num_q_tokens_per_head_k": 8, "num_heads_k": 1, **changes}


def writing(**changes: Any) -> dict[str, Any]:
    cache = bytes_from(0, 2, 16, 1, 576, dtype=torch.float8_e4m3fn)
    arguments = {"kv_c": zeros(2, 512), "k_pe": zeros(2, 64), "k_cache": cache, "slot_mapping": ints(2), "descale_k": torch.ones(1)}
    return {**arguments, **changes}


def gathering(**changes: Any) -> dict[str, Any]:
    cache = bytes_from(0, 2, 16, 1, 576, dtype=torch.float8_e4m3fn)
    arguments = {
        "k_cache": cache, "block_table": ints(2, 1), "cu_seqlens": ints(3), "rows": 4, "starts": ints(2), "descale_k": torch.ones(1),
        "out": zeros(4, 576),
    }  # fmt: skip
    return {**arguments, **changes}


def selecting(**changes: Any) -> dict[str, Any]:
    return {"logits": torch.zeros(3, 40), "lengths": ints(3), "topk": 5, "out": ints(3, 5), **changes}


def rows_scored(**changes: Any) -> dict[str, Any]:
    keys = bytes_from(0, 40, 128, dtype=torch.float8_e4m3fn)
    arguments = {"q": bytes_from(0, 3, 8, 128, dtype=torch.float8_e4m3fn), "kv": (keys, torch.zeros(40)), "weights": torch.zeros(3, 8)}
    return {**arguments, "ks": ints(3), "ke": ints(3), "out": torch.zeros(3, 40), **changes}


def pages_scored(**changes: Any) -> dict[str, Any]:
    q, cache = bytes_from(0, 2, 1, 8, 128, dtype=torch.float8_e4m3fn), bytes_from(0, 3, 16, 1, 132, dtype=torch.uint8)
    arguments = {"q": q, "weights": torch.zeros(2, 8), "context_lens": ints(2), "block_table": ints(2, 3), **changes}
    arguments = {"cache": cache, "metadata": ints(9, 2), "max_context_len": 48, "out": torch.zeros(2, 48), **arguments}
    return arguments


def keys_chosen(**changes: Any) -> dict[str, Any]:
    scored = {name: value for name, value in pages_scored().items() if name not in ("cache", "metadata", "max_context_len", "out")}
    cache, workspace = bytes_from(0, 3, 16, 1, 132, dtype=torch.uint8), torch.zeros(2 * 1024, dtype=torch.uint8)
    return {**scored, "index_cache": cache, "topk": 5, "slots": True, "workspace": workspace, "out": ints(2, 5), **changes}


def index_written(**changes: Any) -> dict[str, Any]:
    norm = {"norm_weight": torch.zeros(128), "norm_bias": torch.zeros(128)}
    arguments = {"k": torch.zeros(2, 128).bfloat16(), "slot_mapping": ints(2), **norm, "cos_sin": torch.zeros(5, 64), "positions": ints(2)}
    return {**arguments, "index_cache": bytes_from(0, 3, 16, 1, 132, dtype=torch.uint8), "rope": "half_split", **changes}


def index_queries(**changes: Any) -> dict[str, Any]:
    arguments = {"q": torch.zeros(2, 3, 128).bfloat16(), "weights": torch.zeros(2, 3), "cos_sin": torch.zeros(5, 64), "positions": ints(2)}
    results = {"out": bytes_from(0, 2, 3, 128, dtype=torch.float8_e4m3fn), "out_weights": torch.zeros(2, 3)}
    return {**arguments, **results, "rope": "interleaved", **changes}


def inserting(**changes: Any) -> dict[str, Any]:
    rotary = {"q_pe": torch.zeros(2, 3, 64).bfloat16(), "cos_sin": torch.zeros(5, 64), "positions": ints(2)}
    arguments = {**writing(), **rotary, "norm_weight": torch.zeros(512).bfloat16()}
    return {**arguments, "keys": torch.zeros(2, 576).bfloat16(), **changes}


Make = Callable[..., dict[str, Any]]
CALLS: dict[str, tuple[Callable[..., Any], Make]] = {
    "dense": (cute_mla.flash_mla_with_kvcache, dense),
    "dense_fp8": (cute_mla.flash_mla_with_kvcache, dense_fp8),
    "sparse": (cute_mla.flash_mla_with_kvcache, sparse_extra),
    "sparse_prefill": (cute_mla.flash_mla_sparse_fwd, sparse_prefill),
    "dense_prefill": (cute_mla.flash_attn_varlen_func, dense_prefill),
    "merge": (cute_mla.merge_states, merging),
    "topk": (topk_indices, selecting),
    "row_logits": (fp8_mqa_logits, rows_scored),
    "paged_logits": (fp8_paged_mqa_logits, pages_scored),
    "indexer_topk": (indexer_topk, keys_chosen),
    "index_write": (write_index_cache, index_written),
    "index_queries": (prepare_index_queries, index_queries),
    "plan": (cute_mla.get_mla_metadata, planning),
    "write": (write_kv_cache, writing),
    "insert": (insert_kv_cache, inserting),
    "gather": (gather_kv_cache, gathering),
}

# The tensor that decides whether a call is traced.
_NOT_Q = {
    "merge": "outs",
    "topk": "logits",
    "index_write": "k",
    "plan": "cache_seqlens",
    "write": "k_cache",
    "insert": "k_cache",
    "gather": "k_cache",
}
TRACED_BY = {call: _NOT_Q.get(call, "q") for call in CALLS}


@pytest.fixture(autouse=True)
def device() -> Iterator[RecordingDevice]:
    with RecordingDevice(sm_count=8).active() as device:
        yield device


def tensors_of(make: Make) -> list[str]:
    """Return the names of the tensors of a call."""
    with RecordingDevice(sm_count=8).active():
        return [name for name, value in make().items() if isinstance(value, Tensor)]


def refused(call: str, name: str, lost: str) -> None:
    """Make a call with one tensor that has lost its memory."""
    function, make = CALLS[call]
    arguments = make()
    arguments[name] = LOST[lost](arguments[name])
    with pytest.raises(
        ValueError, match=rf"^(?:{name}|{name}\[0\]) (?:has shape .* and .* storage|is a FakeTensor).*; supported: a tensor with"
    ):
        function(**arguments)


PLACES = [(call, name) for call, (_, make) in CALLS.items() for name in tensors_of(make)]


@pytest.mark.parametrize("lost", LOST)
@pytest.mark.parametrize(("call", "name"), PLACES)
def test_refused_in_a_first_call(device: RecordingDevice, call: str, name: str, lost: str) -> None:
    if lost == "fake" and name == TRACED_BY[call]:
        pytest.skip("this stand-in makes the call a traced one, and torch refuses tensors with memory beside it")
    device.launches.clear()
    refused(call, name, lost)
    assert [launch for launch in device.launches if "split_plan" not in launch.kernel] == []


@pytest.mark.parametrize("lost", KEPT)
@pytest.mark.parametrize(("call", "name"), [place for place in PLACES if place[0] in ("dense", "dense_fp8", "sparse")])
def test_refused_in_a_repeated_call(device: RecordingDevice, call: str, name: str, lost: str) -> None:
    if lost == "fake" and name == TRACED_BY[call]:
        pytest.skip("this stand-in makes the call a traced one, and torch refuses tensors with memory beside it")
    function, make = CALLS[call]
    for _ in range(2):
        function(**make())
    refused(call, name, lost)
    function(**make())


@pytest.mark.parametrize("name", ["q", "k_cache", "block_table", "out", "lse", "workspace"])
def test_the_simulated_device_looks_at_the_storages_of_repeated_calls(name: str) -> None:
    with cute_mla.simulate("sm90", sm_count=2):
        arguments = dense()
        for _ in range(2):
            cute_mla.flash_mla_with_kvcache(**arguments)
        arguments[name] = shrunk(arguments[name]) if name != "workspace" else arguments[name]
        if name == "workspace":
            arguments[name].untyped_storage().resize_(1 << 10)
        with pytest.raises(ValueError, match=f"^{name} has shape"):
            cute_mla.flash_mla_with_kvcache(**arguments)


@pytest.mark.parametrize("lost", [lost for lost in LOST if lost != "fake"])  # which these functions take: they may be traced
@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("kv", lambda lose: quantise_cache(lose(zeros(1, 16, 1, 576)), "fp8_656")),
        ("out", lambda lose: quantise_cache(zeros(1, 16, 1, 576), "fp8_656", out=lose(zeros(1, 16, 1, 656, dtype=torch.uint8)))),
        ("cache", lambda lose: dequantise_cache(lose(zeros(1, 16, 1, 656, dtype=torch.uint8)), "fp8_656")),
        ("cache", lambda lose: dequantise_cache(lose(zeros(1, 16, 1, 576)), "latent")),
        ("lengths", lambda lose: ContextShard(0, 2).local_lengths(lose(ints(3)))),
        ("positions", lambda lose: ContextShard(0, 2).slots(lose(ints(3, 4)), ints(3, 2), 64)),
        ("block_table", lambda lose: ContextShard(0, 2).slots(ints(3, 4), lose(ints(3, 2)), 64)),
        ("positions", lambda lose: ContextShard(0, 2).local_indices(lose(ints(3, 1, 4)), ints(3, 2), 64)),
    ],
)
def test_refused_where_torch_computes(name: str, call: Callable[[Callable[[Tensor], Tensor]], Any], lost: str) -> None:
    with pytest.raises(ValueError, match=rf"^{name} has shape .* and .* storage"):
        call(LOST[lost])


def test_tensors_of_function_transforms_are_refused() -> None:
    """Their storages cannot be reached."""
    with pytest.raises(ValueError, match=r"^cache_seqlens has shape .* and no storage"):
        torch.func.vmap(lambda lengths: cute_mla.get_mla_metadata(lengths, 8, 1))(ints(2, 3))


def test_an_empty_tensor_needs_no_memory(device: RecordingDevice) -> None:
    for _ in range(2):
        cute_mla.flash_mla_with_kvcache(**dense(block_table=freed(ints(2, 0))))
    assert device.launches != []


def test_overlap_that_takes_too_long_to_decide_is_refused() -> None:
    """Rows of two tensors interleave in a way that numpy's search gives up on."""
    memory = torch.empty(22_000_000, dtype=torch.bfloat16)
    out = memory.as_strided((20, 40, 30, 8), (800_003, 18_377, 449, 9), 0)
    q = memory.as_strided((9, 20, 30, 8), (1_397_280, 438_560, 58_720, 9), 69)
    with pytest.raises(
        ValueError, match=r"^out and q interleave in memory, and whether they share bytes takes too long to decide; supported"
    ):
        check_no_overlap({"out": out}, {"q": q})
    check_no_overlap({"out": out}, {"q": torch.empty(3)})
