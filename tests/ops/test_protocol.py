"""Every op has the protocol of ops/protocol.py: check -> plan -> run, with the arguments of its public function."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Callable
from typing import Any, get_type_hints

import pytest

from cute_mla import indexer as public_indexer
from cute_mla import ops
from cute_mla.api import flashmla, kv_cache, varlen
from cute_mla.api import merge_states as public_merge_states
from cute_mla.ops import (
    cache_gather,
    cache_insert,
    cache_write,
    decode,
    dense_decode,
    dense_prefill,
    dense_prefill_backward,
    head_sums,
    index_write,
    indexer_backward,
    indexer_topk,
    key_lists,
    merge_states,
    mqa_logits,
    sparse_decode,
    sparse_prefill,
    sparse_prefill_backward,
    split_plan,
    topk_indices,
)
from cute_mla.ops.decode_plan import Options, Results
from cute_mla.ops.launch_plan import LaunchPlan
from cute_mla.ops.protocol import Op, Planner

OPS: tuple[Op, ...] = (
    *(cache_gather, cache_insert, cache_write, dense_prefill, dense_prefill_backward, merge_states, sparse_prefill, split_plan),
    indexer_backward,
    sparse_prefill_backward,
    topk_indices,
)
DECODE: tuple[Planner, ...] = (dense_decode, sparse_decode)
PLANNERS: tuple[Planner, ...] = (*DECODE, mqa_logits, index_write, head_sums)  # whose public functions have other bodies than `run`

# The body of each public function.
BODIES: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "flash_mla_sparse_fwd": (sparse_prefill.run, flashmla.flash_mla_sparse_fwd),
    "flash_mla_sparse_bwd": (sparse_prefill_backward.run, flashmla.flash_mla_sparse_bwd),
    "plan_sparse_backward": (key_lists.run_plan, flashmla.plan_sparse_backward),
    "attention_head_sums": (head_sums.run_probs, public_indexer.attention_head_sums),
    "indexer_scores": (head_sums.run_scores, public_indexer.indexer_scores),
    "indexer_backward": (indexer_backward.run, public_indexer.indexer_backward),
    "flash_attn_varlen_func": (dense_prefill.run, varlen.flash_attn_varlen_func),
    "flash_attn_varlen_backward": (dense_prefill_backward.run, varlen.flash_attn_varlen_backward),
    "merge_states": (merge_states.run, public_merge_states),
    "topk_indices": (topk_indices.run, public_indexer.topk_indices),
    "fp8_mqa_logits": (mqa_logits.run_rows, public_indexer.fp8_mqa_logits),
    "fp8_paged_mqa_logits": (mqa_logits.run_pages, public_indexer.fp8_paged_mqa_logits),
    "write_index_cache": (index_write.run_keys, public_indexer.write_index_cache),
    "prepare_index_queries": (index_write.run_queries, public_indexer.prepare_index_queries),
    "indexer_topk": (indexer_topk.run_pages, public_indexer.indexer_topk),
    "indexer_topk_prefill": (indexer_topk.run_rows, public_indexer.indexer_topk_prefill),
    "get_mla_metadata": (split_plan.run, flashmla.get_mla_metadata),
    "write_kv_cache": (cache_write.run, kv_cache.write_kv_cache),
    "insert_kv_cache": (cache_insert.run, kv_cache.insert_kv_cache),
    "gather_kv_cache": (cache_gather.run, kv_cache.gather_kv_cache),
}


def modules() -> dict[str, Any]:
    """Return the modules of the ops' room, by name."""
    return {info.name: importlib.import_module(f"cute_mla.ops.{info.name}") for info in pkgutil.iter_modules(ops.__path__)}


@pytest.mark.parametrize("name", ["plan", "check", "CallSpec"])
def test_every_op_is_on_the_list(name: str) -> None:
    """A module with a part of the protocol has all of it."""
    listed = {op.__name__ for op in (*OPS, *PLANNERS)}  # type: ignore[attr-defined]
    assert {module.__name__ for module in modules().values() if name in vars(module)} == listed


def test_every_run_is_on_the_list() -> None:
    assert {module.__name__ for module in modules().values() if "run" in vars(module)} == {op.__name__ for op in OPS}  # type: ignore[attr-defined]


@pytest.mark.parametrize("op", [*OPS, *PLANNERS])
def test_check_gives_what_plan_takes(op: Planner) -> None:
    """Check returns the CallSpec, a NamedTuple; plan takes it, gives a LaunchPlan, and is cached."""
    hints = get_type_hints(op.plan.__wrapped__)  # type: ignore[attr-defined]
    assert get_type_hints(op.check)["return"] is hints["call"] is op.CallSpec
    assert next(iter(inspect.signature(op.plan).parameters)) == "call"
    assert issubclass(op.CallSpec, tuple)
    assert hasattr(op.CallSpec, "_fields")
    assert issubclass(hints["return"], LaunchPlan)
    assert callable(op.plan.cache_info)  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", BODIES)
def test_a_body_takes_the_arguments_of_its_public_function(name: str) -> None:
    """Names, order and defaults. get_mla_metadata without arguments has no body, so its body has no defaults for the first three."""
    body, public = (inspect.signature(function).parameters for function in BODIES[name])
    assert list(body) == list(public)
    required = list(body)[:3] if name == "get_mla_metadata" else []
    assert all(body[argument].default == public[argument].default for argument in body if argument not in required)


@pytest.mark.parametrize("op", DECODE)
def test_the_key_of_a_decode_call_is_unpacked_as_it_was_packed(op: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every argument comes out under its own name: in the key, or among the tensors."""
    seen: list[Any] = []

    def prepare(key: decode.CallKey, tensors: tuple[Any, ...], schedule: Any) -> None:
        seen.extend((key, tensors, schedule))
        raise LookupError

    monkeypatch.setattr(decode, "prepare", prepare)
    monkeypatch.setattr(decode, "plain_key", lambda key, tensors: key)
    given: dict[str, Any] = {name: object() for name in inspect.signature(flashmla.flash_mla_with_kvcache).parameters}
    if op is dense_decode:
        given["indices"] = None
    with pytest.raises(LookupError):
        flashmla.flash_mla_with_kvcache(**given)
    key, tensors, schedule = seen
    named = dict(zip((*op.Operands._fields, "tile_scheduler_metadata", "num_splits", *Results._fields), tensors, strict=True))
    assert named == {name: given[name] for name in named}
    assert (key.op, key.schedule, schedule) == (op, False, None)
    others = {**dict(zip(Options._fields, key.options, strict=True)), **dict(zip(decode._excluded(op), key.excluded, strict=True))}
    assert others == {name: given[name] for name in others}
    assert {*named, *others} >= set(given) - {"indices", "block_table", "cache_seqlens"}
    assert len(key.types) == len(set(Options._fields) - {"kv_format", "extra_kv_format"})  # a name equals names alone, of one type
    assert key.types == (object,) * len(key.types)
    assert set(key.absences) == {False}
