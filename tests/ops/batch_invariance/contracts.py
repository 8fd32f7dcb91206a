"""Batch invariance, op by op: the requests of a call, and how the same requests look in another call.

A request is what keeps its bits: of decode a request with all its query tokens, of sparse prefill a query token, of dense prefill
a sequence, of merge_states a token, of topk_indices a row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, product
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

import cute_mla
from cute_mla import reference
from cute_mla.indexer import topk_indices
from cute_mla.ops.topk_indices import Keys, select
from cute_mla.spec.arch import Arch
from cute_mla.spec.cache_format import FP8_656, NOPE_528, V41, V41_FP4
from cute_mla.spec.dense_decode import OPERANDS, out_dtypes
from cute_mla.spec.dense_prefill import HEAD_DIMS
from cute_mla.spec.masked_prefill import HEAD_DIMS as MASKED_HEAD_DIMS
from cute_mla.spec.merge_states import MergeStatesConfig
from cute_mla.spec.merge_states import closed_variants as merged_variants
from cute_mla.spec.sparse_decode import QUERY_AND_CACHE
from cute_mla.spec.sparse_prefill import HEAD_DIMS as SPARSE_HEAD_DIMS
from cute_mla.spec.split_plan import INVARIANT_SPLIT_TILES, TILE_KEYS
from cute_mla.spec.topk_indices import BLOCKS_PER_SM, LEAST_SHARED, NARROW, RESIDENT, WIDE, TopkIndicesConfig
from cute_mla.spec.topk_indices import closed_variants as topk_variants
from cute_mla.testing.cases.base import DTYPES
from cute_mla.testing.cases.dense_decode import UNUSED_TABLE_ENTRY, DenseDecodeCase, DenseDecodeTensors
from cute_mla.testing.cases.dense_prefill import DensePrefillCase, DensePrefillTensors
from cute_mla.testing.cases.dense_prefill_backward import DensePrefillBackwardCase, DensePrefillBackwardTensors, DqCase
from cute_mla.testing.cases.mqa_logits import MqaLogitsCase, MqaLogitsTensors
from cute_mla.testing.cases.sparse_decode import Pool, SparseDecodeCase, SparseDecodeTensors
from cute_mla.testing.cases.sparse_prefill import SparsePrefillCase, SparsePrefillTensors
from cute_mla.testing.cases.tensors import OutputBuffer
from cute_mla.testing.operations import operation
from cute_mla.testing.suites.dense_prefill import KINDS as PREFILL_KINDS
from tests.support.bench import Bench, Result, expect

CUT = INVARIANT_SPLIT_TILES * TILE_KEYS  # keys after which a batch-invariant request is cut
FEW_HEADS, MANY_HEADS = 5, 128  # of which a CTA has one tile of rows, and two CTAs one each

Picks = Sequence[int]
Call = tuple[Any, Any]  # a case and its operands
ConfigT = TypeVar("ConfigT")


@dataclass(frozen=True)
class Contract:
    """The inputs that an op's bits may depend on.

    cases: calls of all requests together, among which every variant of the kernel finds one that it serves.
    taken(case, operands, picks, moved): the call of these requests of theirs, in this order, repeated ones too. moved: what belongs to
        them lies elsewhere in memory, tables are wider than any of them needs, and what there is to plan is planned beforehand.
    of(operands, results, place): the results of the request at a place of a call.
    flag: whether it holds with batch_invariant alone, as the cases have it; else always.
    """

    cases: tuple[Any, ...]
    taken: Callable[[Any, Any, Picks, bool], Call]
    of: Callable[[Any, Result, int], Result]
    flag: bool = False
    requests: int = 5
    make: Callable[[Any], Any] = lambda case: operation(case).make_tensors(case, "cpu")
    run: Callable[[Bench, Any, Any], Result] = Bench.run
    expect: Callable[[Any, Any, Result], None] = expect

    def case_for(self, arch: Arch, config: Any) -> Any:
        """Return the first case that a variant serves. LookupError without one."""
        for case in self.cases:
            if case.problem(arch).config == config:
                return case
        raise LookupError(f"no case of the contract runs {config.name} on {arch.name}")


def elsewhere(places: int) -> tuple[Tensor, Tensor]:
    """Return an order of so many rows or pages of a cache, and by its old number the new place of each."""
    order = torch.randperm(places, generator=torch.Generator().manual_seed(17))
    return order, order.argsort()


def in_order(cache: Tensor, order: Tensor) -> Tensor:
    """Return the rows or pages of a cache in another order, of whatever type."""
    return cache.view(torch.uint8)[order].view(cache.dtype)


def widened(table: Tensor, columns: int, entry: int) -> Tensor:
    """Return more columns behind those that a table has."""
    return torch.cat([table, table.new_full((*table.shape[:-1], columns), entry)], dim=-1)


def own_rows(operands: Any, results: Result, place: int) -> Result:
    """Return one request's rows of results whose first dimension counts requests."""
    return tuple(result[place : place + 1] for result in results)


# ---------------------------------------------------------------- dense decode


def _dense_cases(lengths: tuple[int, ...]) -> tuple[DenseDecodeCase, ...]:
    """s_q is 2, so that half of MANY_HEADS fill two CTAs."""
    return tuple(
        DenseDecodeCase(
            dtype, batch=len(lengths), s_q=2, lengths=lengths, h_q=h_q, causal=True, operands=operands, batch_invariant=True, sm_count=3,
        )
        for operands in OPERANDS
        for dtype, h_q in product(out_dtypes(operands), (FEW_HEADS, MANY_HEADS // 2))
    )  # fmt: skip


def _dense_taken(case: DenseDecodeCase, operands: DenseDecodeTensors, picks: Picks, moved: bool) -> Call:
    picked = list(picks)
    operands = replace(
        operands,
        q=at(operands.q, picks),
        block_table=operands.block_table[picked],
        cache_seqlens=operands.cache_seqlens[picked],
        output_buffers={name: _as_given(given, len(picked)) for name, given in operands.output_buffers.items()},
    )
    if not moved:
        return case, operands
    order, place = elsewhere(len(operands.k_cache))
    table = operands.block_table
    used = table != UNUSED_TABLE_ENTRY
    table = torch.where(used, place[table.where(used, torch.zeros_like(table)).long()].int(), table)
    operands = replace(
        operands, k_cache=in_order(operands.k_cache, order), block_table=widened(table, CUT // case.page_size, UNUSED_TABLE_ENTRY)
    )
    return replace(case, metadata="tensors"), operands


def _as_given(given: OutputBuffer, requests: int) -> OutputBuffer:
    result = given.tensor.new_full((requests, *given.tensor.shape[1:]), float("nan"))
    return OutputBuffer(result, result)


# ---------------------------------------------------------------- sparse decode


def _sparse_cases(main: Pool, extra: Pool) -> tuple[SparseDecodeCase, ...]:
    assert isinstance(main.lengths, tuple)
    caches = (*((dtype, cache, "") for dtype, cache in QUERY_AND_CACHE), ("bf16", V41.name, V41_FP4.name))
    return tuple(
        SparseDecodeCase(
            dtype, cache=cache, extra_cache=extra_cache, batch=len(main.lengths), s_q=s_q, h_q=h_q, main=main, extra=extra, indices="mixed",
            sinks="drawn", power_of_two=cache in (FP8_656.name, NOPE_528.name), batch_invariant=True, sm_count=6,
        )
        for (dtype, cache, extra_cache), (s_q, h_q) in product(caches, ((1, FEW_HEADS), (2, MANY_HEADS)))
    )  # fmt: skip


def _sparse_taken(case: SparseDecodeCase, operands: SparseDecodeTensors, picks: Picks, moved: bool) -> Call:
    assert case.extra is not None
    assert operands.topk_length is not None
    assert operands.extra_k_cache is not None
    assert operands.extra_indices is not None
    assert operands.extra_topk_length is not None
    picked = list(picks)
    operands = replace(
        operands,
        q=at(operands.q, picks),
        indices=operands.indices[picked],
        topk_length=operands.topk_length[picked],
        extra_indices=operands.extra_indices[picked],
        extra_topk_length=operands.extra_topk_length[picked],
    )
    if not moved:
        return case, operands
    assert operands.extra_k_cache is not None
    assert operands.extra_indices is not None
    k_cache, indices = _moved_slots(operands.k_cache, operands.indices)
    extra_k_cache, extra_indices = _moved_slots(operands.extra_k_cache, operands.extra_indices)
    operands = replace(
        operands, k_cache=k_cache, indices=widened(indices, CUT, 0), extra_k_cache=extra_k_cache, extra_indices=widened(extra_indices, 3, 0)
    )
    pools = [pool._replace(lengths=None) for pool in case.pools]  # a plan made beforehand goes by the number of requests alone
    return replace(case, batch=len(picks), main=pools[0], extra=pools[1], metadata="tensors"), operands


def _moved_slots(cache: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    """Return a cache with its pages in another order, and the indices that follow them; invalid ones stay as they are."""
    order, place = elsewhere(len(cache))
    page_size = cache.shape[1]
    valid = (indices >= 0) & (indices < len(cache) * page_size)
    slots = indices.where(valid, torch.zeros_like(indices)).long()
    moved = place[slots // page_size] * page_size + slots % page_size
    return in_order(cache, order), torch.where(valid, moved.int(), indices)


# ---------------------------------------------------------------- prefill


_PREFILL_CASES = tuple(
    SparsePrefillCase(
        s_q=5, h_q=h_q, d_qk=d_qk, s_kv=150, topk=140, lengths=(140, 0, 65, 1, 129), indices="mixed", sinks="drawn", sm_count=3,
    )
    for d_qk, h_q in product(SPARSE_HEAD_DIMS, (FEW_HEADS, MANY_HEADS))
)  # fmt: skip


def _prefill_taken(case: SparsePrefillCase, operands: SparsePrefillTensors, picks: Picks, moved: bool) -> Call:
    assert operands.topk_length is not None
    picked = list(picks)
    q, kv, indices, lengths = at(operands.q, picked), operands.kv, operands.indices[picked], operands.topk_length[picked]
    if moved:  # as two requests over the same rows, which lie in another order
        order, place = elsewhere(len(kv))
        valid = (indices >= 0) & (indices < len(kv))
        indices = torch.where(valid, place[indices.where(valid, torch.zeros_like(indices)).long()].int(), indices)
        indices = widened(indices, 70, 0).unflatten(0, (2, -1))
        kv = in_order(kv, order).expand(2, *kv.shape)
        q, lengths = q.unflatten(0, (2, -1)), lengths.unflatten(0, (2, -1))
    return case, replace(operands, q=q, kv=kv, indices=indices, topk_length=lengths)


def _prefill_of(operands: SparsePrefillTensors, results: Result, place: int) -> Result:
    batched = operands.q.dim() == 4
    return own_rows(operands, tuple(result.flatten(0, 1) if batched else result for result in results), place)


_VARLEN_CASES = tuple(
    DensePrefillCase(
        dtype, d_qk=d_qk, lengths=((65, 150), (0, 20), (3, 1), (130, 129), (9, 0)), group=2, causal=d_qk > 128, sm_count=2,
    )
    for dtype, d_qk in PREFILL_KINDS
)  # fmt: skip


_MASKED_CASES = tuple(
    DensePrefillCase("bf16", d_qk=d_qk, lengths=((65, 150), (0, 20), (3, 1), (130, 129), (9, 0)), group=2, mask="random", sm_count=2)
    for d_qk in MASKED_HEAD_DIMS
)


def _varlen_taken(case: DensePrefillCase, operands: DensePrefillTensors, picks: Picks, moved: bool) -> Call:
    """Take requests of a call. moved: with unused rows in front of the keys, and room for longer sequences."""
    lengths = tuple(case.lengths[pick] for pick in picks)
    queries = [range(first, first + case.lengths[pick][0]) for pick in picks for first in (case.q_starts[pick],)]
    keys = [range(first, first + case.lengths[pick][1]) for pick in picks for first in (case.k_starts[pick],)]
    in_front = [0] * 9 if moved else []  # rows of nobody, which are NaN
    q = at(operands.q, [row for rows in queries for row in rows])
    k, v = (tensor[[*in_front, *(row for rows in keys for row in rows)]] for tensor in (operands.k, operands.v))
    starts = [list(accumulate(map(len, rows), initial=first)) for rows, first in ((queries, 0), (keys, len(in_front)))]
    of_queries, of_keys = (torch.tensor(start, dtype=torch.int32) for start in starts)
    mask = None if operands.key_mask is None else operands.key_mask[[row for rows in queries for row in rows]]
    return replace(case, lengths=case.lengths if moved else lengths), DensePrefillTensors(q, k, v, of_queries, of_keys, mask)


def _varlen_of(operands: DensePrefillTensors, results: Result, place: int) -> Result:
    first, end = operands.cu_seqlens_q[place : place + 2].tolist()
    return tuple(result[first:end] for result in results)


def _gradient_cases(kind: type[DensePrefillBackwardCase]) -> tuple[DensePrefillBackwardCase, ...]:
    lengths = ((65, 150), (0, 20), (3, 1), (130, 129), (9, 0))
    return tuple(kind(d_qk=d_qk, lengths=lengths, group=2, causal=d_qk > 128, sm_count=2) for d_qk in HEAD_DIMS)


def _gradient_taken(case: DensePrefillBackwardCase, operands: DensePrefillBackwardTensors, picks: Picks, moved: bool) -> Call:
    """Take requests of a call, as _varlen_taken does."""
    call, own = _varlen_taken(case, operands, picks, moved)
    rows = [row for pick in picks for row in range(case.q_starts[pick], case.q_starts[pick] + case.lengths[pick][0])]
    of_rows = {name: getattr(operands, name)[rows] for name in ("dout", "out", "lse")}
    return call, DensePrefillBackwardTensors(own.q, own.k, own.v, own.cu_seqlens_q, own.cu_seqlens_k, **of_rows)


def _gradient_of(operands: DensePrefillBackwardTensors, results: Result, place: int) -> Result:
    (first, end), (first_key, end_key) = (ends[place : place + 2].tolist() for ends in (operands.cu_seqlens_q, operands.cu_seqlens_k))
    return results[0][first:end], results[1][first_key:end_key], results[2][first_key:end_key]


def at(q: Tensor, picks: Picks) -> Tensor:
    """Return rows of q along its first dimension, in this order, whose rows of elements lie as far apart and as aligned as they did."""
    apart = q.stride(-2) if q.numel() else q.shape[-1]
    picked = torch.full((len(picks), *q.shape[1:-1], apart), float("nan"), dtype=q.dtype)[..., apart - q.shape[-1] :]
    return picked.copy_(q[list(picks)])


# ---------------------------------------------------------------- merge_states


@dataclass(frozen=True)
class ConfigCase(Generic[ConfigT]):
    """A call by one variant, of an op of which nothing but that decides. sm_count: of the device."""

    config: ConfigT
    sm_count: int = 3

    def problem(self, arch: Arch) -> ConfigCase[ConfigT]:
        """Itself, which has a config."""
        del arch
        return self


def _merge_make(case: ConfigCase[MergeStatesConfig]) -> tuple[Tensor, Tensor]:
    """Return three states of five tokens and nine heads, some of which attended to nothing."""
    draw = torch.Generator().manual_seed(5)
    outs = torch.randn(3, 5, 9, case.config.head_dim, generator=draw).to(DTYPES[case.config.dtype])
    lses = 3 * torch.randn(3, 5, 9, generator=draw)
    for state, token in ((0, 0), (0, 3), (1, 3), (2, 3)):
        outs[state, token], lses[state, token] = float("nan"), float("inf")
    return outs, lses


def _merge_taken(case: ConfigCase[MergeStatesConfig], operands: tuple[Tensor, Tensor], picks: Picks, moved: bool) -> Call:
    """Take tokens of a call. moved: rows further apart."""
    picked = list(picks)
    outs, lses = (tensor[:, picked] for tensor in operands)
    if moved:
        outs, lses = (torch.stack([tensor, tensor], dim=2)[:, :, 0] for tensor in (outs, lses))
    return case, (outs, lses)


def _merge_run(bench: Bench, case: ConfigCase[MergeStatesConfig], operands: tuple[Tensor, Tensor]) -> Result:
    with cute_mla.simulate(bench.arch, case.sm_count):
        return cute_mla.merge_states(*operands)


def _merge_expect(case: ConfigCase[MergeStatesConfig], operands: tuple[Tensor, Tensor], results: Result) -> None:
    expected = reference.merge_states(*operands)
    torch.testing.assert_close(results[0].float(), expected[0], rtol=1e-2, atol=1e-5)
    torch.testing.assert_close(results[1], expected[1], rtol=1e-6, atol=2e-6)


# ---------------------------------------------------------------- topk_indices


_TOPK_PAGE = 64  # keys of a page, where keys are given by their slots
_TOPK_ROWS = 5


def _topk_case(config: TopkIndicesConfig) -> ConfigCase[TopkIndicesConfig]:
    """Return a case on a device where five rows have this variant."""
    shares = LEAST_SHARED <= config.cluster < WIDE
    return ConfigCase(config, sm_count=_TOPK_ROWS * config.cluster // BLOCKS_PER_SM if shares else 132)


def _topk_make(case: ConfigCase[TopkIndicesConfig]) -> tuple[Tensor, Tensor]:
    """Return five rows with equal numbers among theirs, and their lengths."""
    columns = {WIDE: RESIDENT // WIDE + 1, NARROW: 900}.get(case.config.cluster, RESIDENT + 1)
    logits = torch.round(4 * torch.randn(_TOPK_ROWS, columns, generator=torch.Generator().manual_seed(7)))
    return logits, torch.tensor([columns, 0, 400, 63, columns - 1], dtype=torch.int32)


def _topk_taken(case: ConfigCase[TopkIndicesConfig], operands: tuple[Tensor, Tensor], picks: Picks, moved: bool) -> Call:
    """Take rows of a call. moved: further apart, from an odd number on."""
    logits, lengths = (tensor[list(picks)] for tensor in operands)
    if moved:
        logits = torch.cat([logits[:, :1], logits, logits[:, :2]], dim=1)[:, 1:-2]
    return case, (logits, lengths)


def _topk_run(bench: Bench, case: ConfigCase[TopkIndicesConfig], operands: tuple[Tensor, Tensor]) -> Result:
    logits, lengths = operands
    with cute_mla.simulate(bench.arch, case.sm_count) as device:  # the SMs decide whether CTAs share a row
        if not case.config.slots:
            return (topk_indices(logits, lengths, 100),)
        out, columns = lengths.new_empty(len(lengths), 100), logits.shape[1]
        keys = Keys(None, lengths, _topk_table(logits), columns, 1, True, _TOPK_PAGE, columns // _TOPK_PAGE + 1)
        select(device, logits, columns, keys, out)
        return (out,)


def _topk_table(logits: Tensor) -> Tensor:
    """Return a block table, by which all rows have the same pages, the last one first."""
    pages = logits.shape[1] // _TOPK_PAGE + 1
    return torch.arange(pages - 1, -1, -1, dtype=torch.int32).expand(len(logits), -1).contiguous()


def _topk_expect(case: ConfigCase[TopkIndicesConfig], operands: tuple[Tensor, Tensor], results: Result) -> None:
    positions = reference.topk_indices(*operands, 100)
    if case.config.slots:
        page = _topk_table(operands[0]).gather(1, positions.clamp(min=0).long() // _TOPK_PAGE)
        positions = torch.where(positions >= 0, page * _TOPK_PAGE + positions % _TOPK_PAGE, -1)
    assert torch.equal(results[0], positions)


# ---------------------------------------------------------------- mqa_logits


def _logits_cases() -> tuple[MqaLogitsCase, ...]:
    """Five requests, or tokens without pages, on two SMs."""
    return tuple(
        MqaLogitsCase(heads=heads, requests=5, tokens=2, keys=200, page_size=64, lengths="edges", values="normal", sm_count=2)
        if paged
        else MqaLogitsCase(heads=heads, tokens=5, keys=200, windows="random", values="normal", sm_count=2)
        for paged in (False, True)
        for heads in (32, 48)
    )


def _logits_taken(case: MqaLogitsCase, operands: MqaLogitsTensors, picks: Picks, moved: bool) -> Call:
    """Take requests of a call, or tokens without pages. moved: keys further apart, and pages elsewhere."""
    picked = list(picks)
    tokens = [case.tokens * pick + token for pick in picked for token in range(case.tokens)] if operands.block_table is not None else picked
    taken = replace(operands, q=at(operands.q, picks), weights=operands.weights[tokens], ke=operands.ke[picked])
    if operands.block_table is None:
        assert operands.ks is not None
        taken = replace(taken, ks=operands.ks[picked])
        if moved:
            wide = torch.cat([taken.keys.view(torch.uint8), taken.keys.view(torch.uint8)[:, :16]], dim=1)
            taken = replace(taken, keys=wide[:, :128].view(torch.float8_e4m3fn))
        return replace(case, tokens=len(picked)), taken
    table = operands.block_table[picked]
    if moved:
        order, place = elsewhere(len(taken.keys))
        used = table < len(taken.keys)
        table = torch.where(used, place[table.where(used, torch.zeros_like(table)).long()].int(), table)
        taken = replace(taken, keys=taken.keys[order])
    return replace(case, requests=len(picked)), replace(taken, block_table=table)


def _logits_of(operands: MqaLogitsTensors, results: Result, place: int) -> Result:
    """Return the rows of a request, or of a token without pages."""
    each = 1 if operands.block_table is None else operands.q.shape[1]
    return tuple(result[place * each : (place + 1) * each] for result in results)


# ---------------------------------------------------------------- the table

SHORT = (70, 0, 200, 1, 129)
DENSE = Contract(_dense_cases(SHORT), _dense_taken, own_rows, flag=True)
SPARSE = Contract(
    _sparse_cases(Pool(200, 140, 64, (130, 0, 70, 1, 3)), Pool(100, 80, 32, (3, 0, 0, 64, 0))), _sparse_taken, own_rows, flag=True
)

COMPUTING: dict[str, Contract] = {
    "dense_decode": DENSE,
    "sparse_decode": SPARSE,
    "sparse_prefill": Contract(_PREFILL_CASES, _prefill_taken, _prefill_of),
    "dense_prefill": Contract(_VARLEN_CASES, _varlen_taken, _varlen_of),
    "masked_prefill": Contract(_MASKED_CASES, _varlen_taken, _varlen_of),
    "dense_prefill_dq": Contract(_gradient_cases(DqCase), _gradient_taken, _gradient_of),
    "dense_prefill_dkdv": Contract(_gradient_cases(DensePrefillBackwardCase), _gradient_taken, _gradient_of),
    "merge_states": Contract(
        tuple(ConfigCase(config) for config in merged_variants()),
        _merge_taken,
        own_rows,
        make=_merge_make,
        run=_merge_run,
        expect=_merge_expect,
    ),
    "mqa_logits": Contract(_logits_cases(), _logits_taken, _logits_of),
    "topk_indices": Contract(
        tuple(_topk_case(config) for config in topk_variants()),
        _topk_taken,
        own_rows,
        make=_topk_make,
        run=_topk_run,
        expect=_topk_expect,
    ),
}

# Requests that are cut, the first of them after CUT keys: then combine runs as well. Of sparse decode inside the second cache.
CUT_CONTRACTS: dict[str, Contract] = {
    "dense_decode": replace(DENSE, cases=_dense_cases((CUT + 70, 30, 0)), requests=3),
    "sparse_decode": replace(
        SPARSE,
        cases=_sparse_cases(Pool(6000, CUT // 2 + 4, 64, (CUT // 2 + 4, 37, 0)), Pool(6000, CUT // 2 + 77, 32, (CUT // 2 + 77, 63, 0))),
        requests=3,
    ),
}

# Kernels that have no call of their own: the contracts whose calls run them.
WITHIN = {"split_plan": ("dense_decode", "sparse_decode"), "combine": ("dense_decode", "sparse_decode")}
