"""Subjects of the training of an indexer: its launches, and its targets and loss, which are torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from cute_mla.indexer import attention_head_sums, indexer_backward, indexer_loss, indexer_scores, indexer_targets
from cute_mla.testing.compare import NO_BOUND, compare
from cute_mla.testing.operations import OPERATIONS
from tests.fuzz.calls import RowsCase, Setting
from tests.fuzz.contract import Contract, is_plain
from tests.fuzz.scalars import is_flag, is_integer, is_scale
from tests.fuzz.subjects import Arguments, Subject, Verify, anything, case_arguments

_MOST_EXPONENT = 50.0  # of probabilities whose error is that of fp32 sums
_SCALES = (1e-6, 10.0)
_PROBS, _SCORES = 3e-5, 2e-6  # relative errors: of a probability, and of the sum of all magnitudes
_GRADIENTS = {"dq": 2.0**-7, "dk": 2.0**-7, "dweights": 1e-5}  # likewise; bf16 rounds twice
_LARGEST = 1 << 31


def _operands(c: Contract, names: tuple[str, str], columns: tuple[int, ...], heads: int, trained: bool = False) -> Tensor | None:
    """Check queries, keys, a number for each head, and indices. Return q, None if there is no telling what the rest should be."""
    keys_name, terms_name = names
    q = c.tensor("q", torch.bfloat16, trained=trained)
    if q is None or not c.require(q.dim() in (3, 4) and q.shape[-1] in columns and 1 <= q.shape[-2] <= heads, "q", keys_name):
        return None
    leading = tuple(q.shape[:-2])
    c.require(math.prod(leading) < _LARGEST, "q")
    offsets = c.get("kv_offsets")
    if offsets is not None:
        c.require(len(leading) == 2, "kv_offsets", "q")
        c.counts("kv_offsets", (leading[0] + 1,))
    own = leading[:1] if len(leading) == 2 and offsets is None else ()
    keys = c.tensor(keys_name, torch.bfloat16, trained=trained)
    shape = (*own, None, *((1,) if keys_name == "kv" else ()), q.shape[-1])
    if c.shaped(keys_name, keys, *shape, beside="kv_offsets") and keys is not None:
        c.last_contiguous(keys_name, keys)
        c.aligned(keys_name, keys, *range(1 + len(own)), positive=False)
        c.require(keys.shape[len(own)] < _LARGEST, keys_name)
    else:
        c.faults.add("q")
    c.shaped(terms_name, c.tensor(terms_name, torch.float32, trained=trained), *q.shape[:-1])
    indices = c.tensor("indices", torch.int32)
    if c.shaped("indices", indices, *leading, 1, None) and indices is not None:
        c.last_contiguous("indices", indices)
        c.require(indices.shape[-1] <= _LARGEST - 64, "indices")
    c.counts("topk_length", leading, optional=True)
    tensors = [name for name, value in c.arguments.items() if isinstance(value, Tensor) and name != "q"]
    c.same_device(q, *tensors)
    return q


def _result(c: Contract, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    c.output(name, shape, (dtype,))
    value = c.get(name)
    c.require(not is_plain(value) or value.is_contiguous(), name)


def _sums(c: Contract, q: Tensor | None) -> set[str]:
    """Check the result of a sum over the heads."""
    indices = c.get("indices")
    if q is None or not is_plain(indices) or not indices.dim():
        return c.faults
    _result(c, "out", (*q.shape[:-2], indices.shape[-1]), torch.float32)
    if "out" in c.faults:
        c.faults.add("indices")
    c.apart(("out",))
    return c.faults


def _head_sums_faults(arguments: Arguments, setting: Setting) -> set[str]:
    c = Contract(arguments)
    c.numbers(sm_scale=is_scale)
    q = _operands(c, ("kv", "lse"), (576, 512), 128)
    sink = c.tensor("attn_sink", torch.float32, optional=True)
    if q is not None and sink is not None and c.shaped("attn_sink", sink, q.shape[-2]):
        c.require(sink.is_contiguous(), "attn_sink")
    return _sums(c, q)


def _scores_faults(arguments: Arguments, setting: Setting) -> set[str]:
    c = Contract(arguments)
    return _sums(c, _operands(c, ("k", "weights"), (128,), 64, trained=c.get("out") is None))


def _backward_faults(arguments: Arguments, setting: Setting) -> set[str]:
    c = Contract(arguments)
    c.numbers(dk_accumulate=is_flag, max_workspace=lambda value: is_integer(value) and value >= 0)
    c.require(c.get("key_plan") is None, "key_plan")  # calls here are broken by values that are no plan
    q, indices, k = _operands(c, ("k", "weights"), (128,), 64), c.get("indices"), c.get("k")
    if q is None:
        return c.faults
    if is_plain(indices) and indices.dim():
        c.shaped("dscores", c.tensor("dscores", torch.float32), *q.shape[:-2], indices.shape[-1], beside="indices")
    adds = is_flag(c.get("dk_accumulate")) and bool(c.get("dk_accumulate"))
    c.require(c.get("dk") is not None or not adds, "dk", "dk_accumulate")
    if is_plain(k):
        dtype = c.get("dk").dtype if is_plain(c.get("dk")) and c.get("dk").dtype in (torch.float32, *(() if adds else (q.dtype,))) else None
        _result(c, "dk", tuple(k.shape), dtype or torch.float32)
        if "dk" in c.faults:
            c.faults.update(("k", "dk_accumulate"))
    _result(c, "dq", tuple(q.shape), q.dtype)
    _result(c, "dweights", tuple(q.shape[:-1]), torch.float32)
    c.apart(("dq", "dk", "dweights"))
    return c.faults


def _magnitudes(arguments: Arguments, *names: str) -> Arguments:
    """Return the arguments with all signs positive: their results bound the sums of magnitudes, by which errors are measured."""
    return {**arguments, **{name: arguments[name].detach().abs() for name in names}}


def _within(expected: Mapping[str, Tensor], limits: Mapping[str, Tensor]) -> Verify:
    """Results differ from a reference's by no more than these limits, element by element."""

    def verify(results: Any) -> str:
        found = (results,) if isinstance(results, Tensor) else results
        reasons = []
        for (name, wanted), result in zip(expected.items(), found, strict=True):
            reasons.append(compare(name, result, wanted, NO_BOUND).reason)
            known = wanted.isfinite()
            wrong = ((result.double() - wanted).abs() > limits[name] + 1e-30)[known] if result.shape == wanted.shape else torch.ones(1)
            reasons.append(f"{name}: {int(wrong.sum())} elements err by more than their terms allow" if wrong.any() else "")
        return "; ".join(filter(None, reasons))

    return verify


def _expect_head_sums(arguments: Arguments, setting: Setting) -> Verify:
    low, high = _SCALES
    if not low < float(arguments["sm_scale"]) < high or (arguments["lse"].abs() > _MOST_EXPONENT)[arguments["lse"].isfinite()].any():
        return anything
    (expected,) = OPERATIONS["head_sums"].expected(arguments)
    # a probability beyond the bound is of an lse that is not that of these scores
    if expected.isnan().any() or expected.abs().gt(math.exp(_MOST_EXPONENT)).any():
        return anything
    return _within({"out": expected}, {"out": _PROBS * expected.abs() + 1e-7})


def _expect_scores(arguments: Arguments, setting: Setting) -> Verify:
    (expected,) = OPERATIONS["head_sums"].expected({name: _plain(value) for name, value in arguments.items()})
    if expected.isnan().any():
        return anything
    (sizes,) = OPERATIONS["head_sums"].expected(_magnitudes(arguments, "q", "k", "weights"))
    return _within({"out": expected}, {"out": _SCORES * sizes.nan_to_num(neginf=0.0)})


def _plain(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value


def _expect_gradients(arguments: Arguments, setting: Setting) -> Verify:
    if arguments["dk_accumulate"]:  # the judge has overwritten what is added to
        return anything
    names = ("dq", "dk", "dweights")
    expected = OPERATIONS["indexer_backward"].expected(arguments)
    if any(result.isnan().any() for result in expected):
        return anything
    sizes = OPERATIONS["indexer_backward"].expected(_magnitudes(arguments, "q", "k", "weights", "dscores"))
    return _within(
        dict(zip(names, expected, strict=True)), {name: _GRADIENTS[name] * size for name, size in zip(names, sizes, strict=True)}
    )


_ROUNDED = 3e-5  # relative error of an fp32 power, of a target, and of their sums
_MOST_NUMBERS = 1 << 20  # beyond it, memory ends before anything is known


def _rows(case: RowsCase) -> Arguments:
    """Return scores and sums. A third of the keys have no probability, though they have scores."""
    draw = torch.Generator().manual_seed(case.seed)
    scores, sums, chosen = (torch.rand(case.shape, generator=draw) for _ in range(3))
    absent = chosen < case.absent
    sums = (8 * sums).masked_fill(absent | (torch.rand(case.shape, generator=draw) < 1 / 3), 0.0)
    scores = (case.spread * (2 * scores - 1)).masked_fill(absent, -math.inf)
    return {"scores": scores.requires_grad_(case.trained), "head_sums": sums}


def _rows_faults(arguments: Arguments, setting: Setting) -> set[str]:
    c = Contract(arguments)
    tensors = {name: c.tensor(name, torch.float32, trained=True) for name in arguments}
    for name, tensor in tensors.items():
        c.require(tensor is None or tensor.dim() > 0, name)
    scores, sums = tensors.get("scores"), tensors["head_sums"]
    if scores is not None and sums is not None:
        fits = scores.shape == sums.shape and scores.device == sums.device and scores.shape[-1:] != (0,)
        c.require(fits, "scores", "head_sums")
    return c.faults


def _are_sums(sums: Tensor) -> bool:
    return sums.device.type != "meta" and sums.numel() < _MOST_NUMBERS and bool((sums.isfinite() & (sums >= 0)).all())


def _targets_of(sums: Tensor) -> Tensor:
    sums = sums.detach().double()
    return (sums / sums.sum(-1, keepdim=True)).nan_to_num()


def _expect_targets(arguments: Arguments, setting: Setting) -> Verify:
    if not _are_sums(arguments["head_sums"]):
        return anything
    expected = _targets_of(arguments["head_sums"])
    return _within({"targets": expected}, {"targets": _ROUNDED * expected})


def _expect_loss(arguments: Arguments, setting: Setting) -> Verify:
    """Expect the divergence, and its gradient where scores have one."""
    scores, sums = arguments["scores"], arguments["head_sums"]
    if not _are_sums(sums) or scores.isnan().any() or (scores == math.inf).any() or (scores.isinf() & (sums > 0)).any():
        return anything
    targets, exact = _targets_of(sums), scores.detach().double()
    wanted = targets > 0
    logs = torch.where(wanted, targets.log() - exact.log_softmax(-1), 0.0)
    sizes = torch.where(wanted, targets * (1 + targets.log().abs() + (exact - exact.amax(-1, keepdim=True)).abs() + logs.abs()), 0.0)
    verify = _within({"loss": (targets * logs).sum(-1)}, {"loss": _ROUNDED * sizes.sum(-1)})
    predicted = torch.where(wanted.any(-1, keepdim=True), exact.softmax(-1), 0.0)

    def verify_both(loss: Tensor) -> str:
        if not scores.requires_grad or verify(loss):
            return verify(loss)
        (gradient,) = torch.autograd.grad(loss.sum(), scores, retain_graph=True)
        return _within({"gradient": predicted - targets}, {"gradient": _ROUNDED * (predicted + targets)})(gradient)

    return verify_both


TRAINING_SUBJECTS: dict[str, Subject] = {
    "attention_head_sums": Subject(attention_head_sums, case_arguments, _head_sums_faults, _expect_head_sums),
    "indexer_scores": Subject(indexer_scores, case_arguments, _scores_faults, _expect_scores),
    "indexer_backward": Subject(indexer_backward, case_arguments, _backward_faults, _expect_gradients),
    "indexer_targets": Subject(indexer_targets, lambda case: {"head_sums": _rows(case)["head_sums"]}, _rows_faults, _expect_targets),
    "indexer_loss": Subject(indexer_loss, _rows, _rows_faults, _expect_loss),
}
