"""Batch invariance, op by op: the calls whose requests keep their bits. The records say what a request is, and how it is taken."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
from torch import Tensor

import cute_mla
from cute_mla.ops.topk_indices import Keys, select
from cute_mla.spec.arch import SM90, Arch
from cute_mla.spec.cache_format import FP8_656, NOPE_528, V41, V41_FP4
from cute_mla.spec.cache_insert import closed_variants as insert_variants
from cute_mla.spec.cache_rows import FP8_576, CacheRowsConfig
from cute_mla.spec.cache_rows import closed_variants as cached_variants
from cute_mla.spec.dense_decode import LATENT, OPERANDS, out_dtypes
from cute_mla.spec.dense_prefill import HEAD_DIMS
from cute_mla.spec.head_sums import closed_variants as summed_variants
from cute_mla.spec.index_write import closed_variants as index_variants
from cute_mla.spec.masked_prefill import HEAD_DIMS as MASKED_HEAD_DIMS
from cute_mla.spec.merge_states import closed_variants as merged_variants
from cute_mla.spec.mla import D_QK, DENSE_DIMS
from cute_mla.spec.sparse_decode import QUERY_AND_CACHE
from cute_mla.spec.sparse_prefill import HEAD_DIMS as SPARSE_HEAD_DIMS
from cute_mla.spec.topk_indices import BLOCKS_PER_SM, LEAST_SHARED, NARROW, RESIDENT, WIDE, TopkIndicesConfig
from cute_mla.spec.topk_indices import closed_variants as topk_variants
from cute_mla.testing.cases.base import DTYPES
from cute_mla.testing.operations import OPERATIONS
from cute_mla.testing.operations.cache_gather.case import CacheGatherCase
from cute_mla.testing.operations.cache_insert.case import CacheInsertCase
from cute_mla.testing.operations.cache_write.case import CacheWriteCase
from cute_mla.testing.operations.dense_decode.case import DenseDecodeCase
from cute_mla.testing.operations.dense_prefill.case import DensePrefillCase
from cute_mla.testing.operations.dense_prefill.suites import KINDS as PREFILL_KINDS
from cute_mla.testing.operations.dense_prefill_backward.case import DensePrefillBackwardCase, DqCase
from cute_mla.testing.operations.head_sums.case import HeadSumsCase
from cute_mla.testing.operations.index_write.case import IndexWriteCase
from cute_mla.testing.operations.indexer_backward.case import IndexerBackwardCase
from cute_mla.testing.operations.merge_states.case import MergeStatesCase
from cute_mla.testing.operations.mqa_logits.case import MqaLogitsCase
from cute_mla.testing.operations.requests import CUT
from cute_mla.testing.operations.sparse_decode.case import Pool, SparseDecodeCase
from cute_mla.testing.operations.sparse_prefill.case import SparsePrefillCase
from cute_mla.testing.operations.sparse_prefill_backward.case import DkvCase, SparsePrefillBackwardCase
from cute_mla.testing.operations.topk_indices.case import TopkIndicesCase, TopkIndicesTensors, TopkProblem
from tests.support.bench import Bench, Result, expect

FEW_HEADS, SOME_HEADS, MANY_HEADS = 5, 20, 128  # a CTA has one tile of rows of the first two, two CTAs have one each of the last
SEQUENCES = ((65, 150), (0, 20), (3, 1), (130, 129), (9, 0))


@dataclass(frozen=True)
class Contract:
    """The inputs that an op's bits may depend on.

    cases: calls of all requests together, among which every variant of the kernel finds one that it serves.
    flag: whether it holds with batch_invariant alone, as the cases have it; else always.
    """

    cases: tuple[Any, ...]
    flag: bool = False
    run: Callable[[Bench, Any, Any], Result] = Bench.run
    expect: Callable[[Any, Any, Result, Arch], None] = expect

    def case_for(self, arch: Arch, config: Any) -> Any:
        """Return the first case that a variant serves. LookupError without one."""
        for case in self.cases:
            if case.problem(arch).config == config:
                return case
        raise LookupError(f"no case of the contract runs {config.name} on {arch.name}")


def _dense_cases(lengths: tuple[int, ...]) -> tuple[DenseDecodeCase, ...]:
    """s_q is 2, so that half of MANY_HEADS fill two CTAs."""
    return tuple(
        DenseDecodeCase(
            dtype, batch=len(lengths), s_q=2, lengths=lengths, h_q=h_q, d_qk=d_qk, causal=True, operands=operands, batch_invariant=True,
            sm_count=3,
        )
        for operands in OPERANDS
        for d_qk in (DENSE_DIMS if operands == LATENT else (D_QK,))
        for dtype, h_q in product(out_dtypes(operands, d_qk), (FEW_HEADS, MANY_HEADS // 2))
    )  # fmt: skip


def _sparse_cases(main: Pool, extra: Pool) -> tuple[SparseDecodeCase, ...]:
    assert isinstance(main.lengths, tuple)
    caches = (*((dtype, cache, "") for dtype, cache in QUERY_AND_CACHE), ("bf16", V41.name, V41_FP4.name))
    return tuple(
        SparseDecodeCase(
            dtype, cache=cache, extra_cache=extra_cache, batch=len(main.lengths), s_q=s_q, h_q=h_q, main=main, extra=extra, indices="mixed",
            sinks="drawn", power_of_two=cache in (FP8_656.name, NOPE_528.name), batch_invariant=True, sm_count=6,
        )
        for (dtype, cache, extra_cache), (s_q, h_q) in product(caches, ((1, FEW_HEADS), (1, SOME_HEADS), (2, MANY_HEADS)))
    )  # fmt: skip


_PREFILL_CASES = tuple(
    SparsePrefillCase(
        s_q=5, h_q=h_q, d_qk=d_qk, s_kv=150, topk=140, lengths=(140, 0, 65, 1, 129), indices="mixed", sinks="drawn", sm_count=3,
    )
    for d_qk, h_q in product(SPARSE_HEAD_DIMS, (FEW_HEADS, MANY_HEADS))
)  # fmt: skip


def _sparse_gradient_cases(kind: type[SparsePrefillBackwardCase]) -> tuple[SparsePrefillBackwardCase, ...]:
    """Three requests, which are what keeps its bits: dkv is a sum over the tokens of one."""
    return tuple(
        kind(
            form="batched", batch=3, s_q=2, h_q=h_q, d_qk=d_qk, s_kv=150, topk=140, lengths=(140, 0, 65, 1, 129, 64), indices="mixed",
            sinks="drawn", sm_count=3,
        )
        for d_qk, h_q in product(SPARSE_HEAD_DIMS, (FEW_HEADS, MANY_HEADS))
    )  # fmt: skip


_SUMS_CASES = tuple(
    HeadSumsCase(s_q=5, h_q=20, d_qk=config.columns, s_kv=150, topk=140, lengths=(140, 0, 65, 1, 129), indices="mixed", sm_count=3)
    for config in summed_variants()
)
_INDEX_GRADIENT_CASES = (
    IndexerBackwardCase(
        form="batched", batch=3, s_q=2, h_q=20, s_kv=150, topk=140, lengths=(140, 0, 65, 1, 129, 64), indices="mixed", sm_count=3
    ),
)
_VARLEN_CASES = tuple(
    DensePrefillCase(dtype, d_qk=d_qk, lengths=SEQUENCES, group=2, causal=d_qk > 128, sm_count=2) for dtype, d_qk in PREFILL_KINDS
)


def _gradient_cases(kind: type[DensePrefillBackwardCase]) -> tuple[DensePrefillBackwardCase, ...]:
    return tuple(kind(d_qk=d_qk, lengths=SEQUENCES, group=2, causal=d_qk > 128, sm_count=2) for d_qk in HEAD_DIMS)


_MASKED_CASES = tuple(
    DensePrefillCase("bf16", d_qk=d_qk, lengths=SEQUENCES, group=2, mask="random", sm_count=2) for d_qk in MASKED_HEAD_DIMS
)
_MERGE_CASES = tuple(
    MergeStatesCase(config.dtype, head_dim=config.head_dim, states=3, h_q=9, form="stacked", empty="some", sm_count=3)
    for config in merged_variants()
)
_INDEX_CASES = tuple(
    IndexWriteCase(rows=config.rows, tokens=5, heads=3 if config.rows == "queries" else 1, page_size=32, values="nasty", sm_count=3)
    for config in index_variants()
)
_LOGITS_CASES = tuple(
    MqaLogitsCase(heads=heads, requests=5, tokens=2, keys=200, page_size=64, lengths="edges", values="normal", sm_count=2)
    if paged
    else MqaLogitsCase(heads=heads, tokens=5, keys=200, windows="random", values="normal", sm_count=2)
    for paged in (False, True)
    for heads in (32, 48)
)


def _of_caches(kind: Any, variants: Iterable[CacheRowsConfig], **fields: Any) -> tuple[Any, ...]:
    """Return a case for each kind of cached keys, in pages of 32."""

    def case(config: CacheRowsConfig) -> Any:
        dtype = config.dtype if config.dtype in DTYPES else "bf16"
        scale = 0.0137 if config.format is FP8_576 else None
        return kind(dtype, cache=config.cache, page_size=32, scale_of_cache=scale, sm_count=3, **fields)

    return tuple(map(case, variants))


# ---------------------------------------------------------------- topk_indices, whose variants for slots have no call of their own


_TOPK, _TOPK_PAGE, _TOPK_ROWS = 100, 64, 5


@dataclass(frozen=True)
class TopkCase(TopkIndicesCase):
    """A call by one variant, on a device where five rows have it."""

    config: TopkIndicesConfig | None = None

    def problem(self, arch: Arch) -> TopkProblem:
        """Return the variant of the case."""
        assert self.config is not None
        return TopkProblem(self.config)


def _topk_case(config: TopkIndicesConfig) -> TopkCase:
    columns = {WIDE: RESIDENT // WIDE + 1, NARROW: 900}.get(config.cluster, RESIDENT + 1)
    sm_count = _TOPK_ROWS * config.cluster // BLOCKS_PER_SM if LEAST_SHARED <= config.cluster < WIDE else 132
    if config.stream:
        columns, sm_count = RESIDENT + 1, 1
    return TopkCase(rows=_TOPK_ROWS, columns=columns, topk=_TOPK, values="few", lengths="edges", sm_count=sm_count, config=config)


def _topk_run(bench: Bench, case: TopkCase, operands: TopkIndicesTensors) -> Result:
    assert case.config is not None
    if not case.config.slots:
        return bench.run(case, operands)
    lengths, columns = operands.lengths, operands.logits.shape[1]
    with cute_mla.simulate(bench.arch, case.sm_count) as device:  # the SMs decide whether CTAs share a row
        out = lengths.new_empty(len(lengths), _TOPK)
        keys = Keys(None, lengths, _topk_table(operands.logits), columns, 1, True, _TOPK_PAGE, columns // _TOPK_PAGE + 1)
        select(device, operands.logits, columns, keys, out)
        return (out,)


def _topk_table(logits: Tensor) -> Tensor:
    """Return a block table, by which all rows have the same pages, the last one first."""
    pages = logits.shape[1] // _TOPK_PAGE + 1
    return torch.arange(pages - 1, -1, -1, dtype=torch.int32).expand(len(logits), -1).contiguous()


def _topk_expect(case: TopkCase, operands: TopkIndicesTensors, results: Result, arch: Arch) -> None:
    assert case.config is not None
    (positions,) = OPERATIONS[case.op].reference(case, operands)
    if case.config.slots:
        page = _topk_table(operands.logits).gather(1, positions.clamp(min=0).long() // _TOPK_PAGE)
        positions = torch.where(positions >= 0, page * _TOPK_PAGE + positions % _TOPK_PAGE, -1)
    assert torch.equal(results[0], positions)


# ---------------------------------------------------------------- the table

SHORT = (70, 0, 200, 1, 129)
DENSE = Contract(_dense_cases(SHORT), flag=True)
SPARSE = Contract(_sparse_cases(Pool(200, 140, 64, (130, 0, 70, 1, 3)), Pool(100, 80, 32, (3, 0, 0, 64, 0))), flag=True)

CONTRACTS: dict[str, Contract] = {
    "dense_decode": DENSE,
    "sparse_decode": SPARSE,
    "sparse_prefill": Contract(_PREFILL_CASES),
    "sparse_prefill_dq": Contract(_sparse_gradient_cases(SparsePrefillBackwardCase)),
    "sparse_prefill_dkv": Contract(_sparse_gradient_cases(DkvCase)),
    "head_sums": Contract(_SUMS_CASES),
    "indexer_backward": Contract(_INDEX_GRADIENT_CASES),
    "dense_prefill": Contract(_VARLEN_CASES),
    "masked_prefill": Contract(_MASKED_CASES),
    "dense_prefill_dq": Contract(_gradient_cases(DqCase)),
    "dense_prefill_dkdv": Contract(_gradient_cases(DensePrefillBackwardCase)),
    "merge_states": Contract(_MERGE_CASES),
    "mqa_logits": Contract(_LOGITS_CASES),
    "topk_indices": Contract(tuple(map(_topk_case, topk_variants(SM90))), run=_topk_run, expect=_topk_expect),
    "index_write": Contract(_INDEX_CASES),
    "cache_write": Contract(_of_caches(CacheWriteCase, cached_variants(), tokens=5, pages=3, values="nasty")),
    "cache_insert": Contract(_of_caches(CacheInsertCase, insert_variants(), tokens=5, pages=3, kept="packed")),
    "cache_gather": Contract(_of_caches(CacheGatherCase, cached_variants(), lengths=(9, 0, 40, 1, 5), pages=8)),
}

# Requests that are cut, the first of them after CUT keys: then combine runs as well. Of sparse decode inside the second cache.
CUT_CONTRACTS: dict[str, Contract] = {
    "dense_decode": replace(DENSE, cases=_dense_cases((CUT + 70, 30, 0))),
    "sparse_decode": replace(
        SPARSE,
        cases=_sparse_cases(Pool(6000, CUT // 2 + 4, 64, (CUT // 2 + 4, 37, 0)), Pool(6000, CUT // 2 + 77, 32, (CUT // 2 + 77, 63, 0))),
    ),
}

# Kernels that have no call of their own: the contracts whose calls run them.
WITHIN = {
    **dict.fromkeys(("split_plan", "combine"), ("dense_decode", "sparse_decode")),
    "row_statistics": ("sparse_prefill_dq", "sparse_prefill_dkv"),
    **dict.fromkeys(("key_lists", "row_sums"), ("sparse_prefill_dq", "sparse_prefill_dkv", "indexer_backward")),
}
