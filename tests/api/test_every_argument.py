"""Every argument of every public function: eager, traced and compiled, and whatever kind of number it is."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from cute_mla.runtime.arguments import Span
from tests.support.compiling import fresh
from tests.support.dispatch_modes import Recorded
from tests.support.public_calls import Arguments, calls_of, function_of, public_names
from tests.support.recording_device import RecordingDevice

assert fresh

ONE_VALUE = {"d_v", "dropout_p"}  # arguments with a single supported value, which is the default
RESULTS = {"out", "lse", "max_logits", "lse_indexer", "workspace", "dq", "dk", "dv", "dkv", "d_sink", "out_weights", "dweights"}
NO_OP = {"flash_attn_varlen_kvpacked_func", "flash_attn_varlen_qkvpacked_func", "get_paged_mqa_logits_metadata"}  # call others, or torch
IN_PARTS = {"kv": ["keys", "scales"]}  # arguments that an op takes as several
WHOLE_KV = ("flash_mla_sparse", "attention_head_sums")  # whose kv is one tensor
NAMES = public_names()
EAGER = [name for name in NAMES if name != "get_paged_mqa_logits_metadata"]  # which launches nothing


@pytest.fixture
def device() -> Iterator[RecordingDevice]:
    with RecordingDevice(sm_count=8).active() as device:
        yield device


def parameters(name: str) -> dict[str, inspect.Parameter]:
    return dict(inspect.signature(function_of(name)).parameters)


@pytest.mark.parametrize("name", NAMES)
def test_the_calls_give_every_argument_another_value_than_its_default(device: RecordingDevice, name: str) -> None:
    left = parameters(name)
    for arguments in calls_of(name):
        for argument, value in arguments.items():
            default = parameters(name)[argument].default
            if isinstance(value, Tensor | list | tuple) or value != default or argument in ONE_VALUE:
                left.pop(argument, None)
    assert not left


@pytest.mark.parametrize("name", [name for name in NAMES if name not in NO_OP])
def test_an_op_has_the_arguments_and_defaults_of_its_function(name: str) -> None:
    schema = getattr(torch.ops.cute_mla, name).default._schema
    given = {argument.name: argument for argument in schema.arguments}
    if name == "flash_mla_sparse_fwd":
        given["indexer_topk"] = None  # of an op of its own
    if name == "flash_attn_varlen_func":
        given["key_mask"] = None  # likewise
    if name == "merge_states":
        del given["stacked"]  # an op takes lists alone
    for argument, parameter in parameters(name).items():
        own = [given.pop(part, None) for part in ((IN_PARTS.get(argument) if not name.startswith(WHOLE_KV) else None) or [argument])]
        if argument in RESULTS and own == [None]:
            continue
        for part in own:
            if part is None:
                assert argument in ("indexer_topk", "key_mask"), f"the op lacks {argument}"
            elif parameter.default is inspect.Parameter.empty or (name == "get_mla_metadata" and not part.has_default_value()):
                assert not part.has_default_value()
            else:
                assert part.default_value == (None if argument == "empty_lse" else parameter.default)
    assert not given


def looks(results: Any) -> Any:
    """Return what is known of results without their contents."""
    return pytree.tree_map(lambda value: (value.dtype, *value.shape, *value.stride()) if isinstance(value, Tensor) else value, results)


def launched(device: RecordingDevice) -> list[Any]:
    """Return the launches so far, with shapes in place of memory, and forget them."""

    def plain(value: Any) -> Any:
        if isinstance(value, Span):
            return value.offset, value.nbytes
        return looks(value) if isinstance(value, Tensor) else value._replace(address=0) if hasattr(value, "_replace") else str(type(value))

    def scalar(value: Any) -> Any:
        return value if value.__class__ in (int, float, type(None)) else plain(value)

    seen = [(launch.kernel, launch.grid, {name: scalar(value) for name, value in launch.args.items()}) for launch in device.launches]
    device.launches.clear()
    return seen


def eager(device: RecordingDevice, name: str, arguments: Arguments) -> tuple[Any, list[Any]]:
    """Make a call; return its results and its launches."""
    device.launches.clear()
    results = looks(function_of(name)(**arguments))
    return results, launched(device)


def graph_of(name: str, tensors: Arguments, others: Arguments) -> Any:
    """Trace a call with symbolic shapes."""
    return make_fx(lambda tensors: (function_of(name)(**tensors, **others),), tracing_mode="symbolic")(tensors)


@pytest.mark.parametrize("name", NAMES)
def test_a_call_is_the_same_traced(device: RecordingDevice, name: str) -> None:
    for arguments in calls_of(name):
        expected = eager(device, name, arguments)
        tensors = {key: value for key, value in arguments.items() if any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(value))}
        others = {key: value for key, value in arguments.items() if key not in tensors}
        graph = graph_of(name, tensors, others)
        assert not device.launches
        called = [str(node.target).split(".")[1] for node in graph.graph.nodes if "cute_mla" in str(node.target)]
        assert bool(called) == (name in EAGER)
        assert name in NO_OP or called[-1].startswith(name.removesuffix("_func"))
        (results,) = graph(tensors)
        assert (looks(results), launched(device)) == expected


@pytest.mark.parametrize("name", EAGER)
def test_a_call_that_is_not_traced_goes_through_no_op(device: RecordingDevice, name: str) -> None:
    for arguments in calls_of(name):
        device.launches.clear()
        with Recorded() as seen:
            function_of(name)(**arguments)
        assert device.launches
        assert [op for op in seen.names if "cute_mla" in op] == []


@pytest.mark.in_turn
@pytest.mark.parametrize("dynamic", [None, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", NAMES)
def test_a_call_is_the_same_compiled(device: RecordingDevice, name: str, dynamic: bool | None) -> None:
    """Dynamic: shapes and integers are symbols."""
    for arguments in calls_of(name):
        expected = eager(device, name, arguments)
        torch._dynamo.reset()
        call = torch.compile(function_of(name), backend="aot_eager", fullgraph=True, dynamic=dynamic)
        assert (looks(call(**arguments)), launched(device)) == expected


KINDS: dict[type, list[Callable[[Any], Any]]] = {
    int: [np.int64, np.int32, np.uint32],
    float: [np.float64, np.float32, np.float16],
    bool: [np.bool_],
}


@pytest.mark.parametrize("name", EAGER)
def test_numbers_of_numpy_are_taken_as_plain_ones(device: RecordingDevice, name: str) -> None:
    """First, so that no plan is kept for the plain call; and again after it."""
    for plain in calls_of(name):
        scalars = [argument for argument, value in plain.items() if value.__class__ in KINDS]
        for argument in scalars:
            for kind in KINDS[plain[argument].__class__]:
                other = {**plain, argument: kind(plain[argument])}
                first, expected, again = (eager(device, name, call) for call in (other, {**plain, argument: other[argument].item()}, other))
                assert first == expected == again, f"{argument} of {kind}"


@pytest.mark.parametrize("name", EAGER)
def test_numbers_that_are_none_are_refused(device: RecordingDevice, name: str) -> None:
    """An int for a flag, a bool for a number, a tensor, which the host would have to read."""
    for plain in calls_of(name):
        for argument, value in plain.items():
            if value.__class__ not in KINDS:
                continue
            wrong = [torch.tensor(value), np.array([value, value]), "1", [value]] + ([int(value)] if value.__class__ is bool else [True])
            for bad in wrong:
                with pytest.raises(ValueError, match=argument):
                    function_of(name)(**{**plain, argument: bad})
