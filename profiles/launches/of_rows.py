"""From a benchmark row to its `Launch`: the kernel, its CTAs, the work of each CTA, and the combine after it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import Any

from cute_mla.manifest import kernel_name
from cute_mla.ops.indexer_topk import divide
from cute_mla.ops.sparse_prefill_backward import DEFAULT_WORKSPACE
from cute_mla.spec import (
    cache_insert,
    cache_write,
    dense_prefill,
    dense_prefill_dkdv,
    dense_prefill_dq,
    index_write,
    merge_states,
    sparse_prefill_dkv,
    sparse_prefill_dq,
    topk_indices,
)
from cute_mla.spec import combine as combine_spec
from cute_mla.spec.arch import ARCHS, Arch
from cute_mla.spec.cache_format import FORMATS
from cute_mla.spec.dense_decode import TILE_ROWS, TILINGS, DenseDecodeProblem, unit_tokens, whole_eighths
from cute_mla.spec.kernel_ops import ARCHS_OF, KERNEL_OPS
from cute_mla.spec.mla import D_V, ELEMENT_BYTES, MAX_HEADS, ceil_div
from cute_mla.spec.mqa_logits import MqaLogitsProblem
from cute_mla.spec.sparse_decode import SPREAD_ROWS, SparseDecodeProblem, serving_kernels
from cute_mla.spec.sparse_decode import num_parts as parts_of_plan
from cute_mla.spec.sparse_prefill import SparsePrefillProblem
from cute_mla.spec.split_plan import NO_WINDOW, TILE_KEYS, KeyWindow, accumulator_rows, piece_overhead

from ..clock.constants import constants
from ..roofline import GPUS
from ..rows import Case
from ..shapes import (
    CacheInsertShape,
    CacheWriteShape,
    CombineShape,
    DecodeShape,
    DensePrefillBackwardShape,
    DensePrefillShape,
    IndexerShape,
    IndexWriteShape,
    MergeShape,
    SparseDecodeShape,
    SparsePrefillBackwardShape,
    SparsePrefillShape,
    TopkShape,
)
from .launch import Combine, Launch, NoLaunchError
from .partition import (
    CtaWork,
    DecodeWork,
    KeyTiles,
    PrefillTiles,
    decode_work,
    dense_prefill_order,
    logits_work,
    prefill_work,
    sorted_prefill_order,
    sparse_prefill_work,
)
from .products import block_flops

CACHE_WRITE_CTAS_PER_SM = 12  # 128 threads of 40 registers
CACHE_INSERT_CTAS_PER_SM = 8  # 128 threads of 64 registers
INDEX_WRITE_CTAS_PER_SM = {True: 12, False: 16}  # by whether rows are keys: 128 threads of 40 registers, of queries 32
ROW_SUMS_PER_SM = 7  # 288 threads of 32 registers
COMBINE_CTAS_PER_SM = 2  # 256 threads of 105 registers, and the launch asks for two
ACCUMULATOR_ROW_BYTES = 4 * (D_V + 1)
_TOKENS_PER_LOOKUP = 32  # query tokens that combine looks up at once, one a lane


@dataclass(frozen=True)
class Target:
    """GPU that a row is launched on."""

    arch: Arch
    sm_count: int


@cache
def launch_on(case: Case, gpu: str) -> Launch | Combine:
    """Return the launch of a row on a GPU. NoLaunchError, with the reason, for a row without one."""
    return launch_of(case, Target(ARCHS[GPUS[gpu].arch], constants(gpu).sm_count))


def launch_of(case: Case, target: Target) -> Launch | Combine:
    """Return the launch of a row on a GPU. NoLaunchError for a shape that no op has."""
    make = _LAUNCHES.get(type(case.shape))
    if make is None:
        raise NoLaunchError(f"no launch of {case.op}")
    if target.arch not in ARCHS_OF.get(case.op, ARCHS.values()):
        raise NoLaunchError(f"{case.op} has no kernels for {target.arch.name}")
    return make(case, case.shape, target)


def _kernel(op: str, config: Any, target: Target) -> dict[str, Any]:
    """Return the fields of a Launch that describe its kernel. NoLaunchError for a variant that the architecture does not have."""
    arch = target.arch
    if config not in KERNEL_OPS[op].variants(arch):
        raise NoLaunchError(f"{op} has no {config.name} for {arch.name}")
    return {"kernel": kernel_name(op, arch.name, config.name), "flops": block_flops(op, arch.name, asdict(config))}


def _dense_decode(case: Case, shape: DecodeShape, target: Target) -> Launch:
    columns = ceil_div(max(shape.lengths, default=0), shape.page_size)
    window = KeyWindow(shape.window + shape.s_q - 1) if shape.window else NO_WINDOW
    requests, s_q, lengths, again = shape.batch, shape.s_q, tuple(map(window.visible_keys, shape.lengths)), 0
    if shape.tokens:  # work units, of which those of a request read its keys one after the other
        s_q = unit_tokens(shape.s_q, shape.h_q // shape.h_kv)
        units = [(tokens, ceil_div(tokens, s_q), length) for tokens, length in zip(shape.tokens, shape.lengths, strict=True)]
        lengths = tuple(max(length - max(tokens - (unit + 1) * s_q, 0), 0) for tokens, count, length in units for unit in range(count))
        requests, again = len(lengths), sum(lengths) - sum(length for _, count, length in units if count)
    problem = DenseDecodeProblem(
        target.arch,
        case.dtype,
        requests,
        s_q,
        shape.h_q,
        shape.h_kv,
        shape.page_size,
        columns,
        operands=shape.operands,
        d_qk=shape.d_qk,
    )
    launch = _decode(case, problem, lengths, shape.h_kv, target)
    return replace(launch, bytes=launch.bytes + float(again * shape.cache_row_bytes * shape.h_kv))


def _sparse_decode(case: Case, shape: SparseDecodeShape, target: Target) -> Launch:
    kernels = serving_kernels(FORMATS[shape.cache], None if shape.extra is None else FORMATS[shape.extra])
    assert kernels is not None, "rows have formats that are served together"
    batch, s_q = (sum(shape.tokens), 1) if shape.tokens else (shape.batch, shape.s_q)  # each packed token is a unit
    problem = SparseDecodeProblem(
        target.arch,
        case.dtype,
        kernels,
        batch,
        s_q,
        shape.h_q,
        shape.topk,
        shape.extra_topk,
        counted_parts=0 if shape.tokens else parts_of_plan(target.arch, shape.h_q, s_q, target.sm_count),
    )
    return _decode(case, problem, (problem.max_keys,) * batch, s_q, target)


def _decode(case: Case, problem: DenseDecodeProblem | SparseDecodeProblem, lengths: Sequence[int], columns: int, target: Target) -> Launch:
    """Return a decode over requests of these lengths, with its combine. columns: CTAs along the grid's second dimension."""
    kernel = _kernel(case.op, problem.config, target)
    num_parts = problem.num_parts(target.sm_count)
    eighths = whole_eighths(target.arch, problem.few_rows) if isinstance(problem, DenseDecodeProblem) else 0
    work = decode_work(lengths, num_parts, problem.max_splits, eighths, piece_overhead(target.arch))
    combine = _combine_after(problem, num_parts, work, target.sm_count)
    row_ctas = problem.grid(target.sm_count)[0]
    ctas = row_ctas * columns * len(work.cta_work)
    tile_rows = TILINGS[target.arch.name].rows
    if problem.config.rows64:
        tile_rows = TILE_ROWS if row_ctas == problem.row_ctas else SPREAD_ROWS
    rows = min(problem.rows if isinstance(problem, DenseDecodeProblem) else problem.h_q, tile_rows * problem.config.cluster, MAX_HEADS)
    return Launch(**kernel, cta_work=work.cta_work, row_ctas=row_ctas, ctas=ctas, bytes=case.work.bytes, combine=combine, rows=rows)


def _sparse_prefill(case: Case, shape: SparsePrefillShape, target: Target) -> Launch:
    problem = SparsePrefillProblem(target.arch, case.dtype, shape.d_qk, 1, shape.s_q, shape.h_q)
    kernel = _kernel("sparse_prefill", problem.config, target)
    groups = problem.grid(target.sm_count)[2]
    cta_work = sparse_prefill_work(problem.tokens, groups, ceil_div(shape.topk, TILE_KEYS))
    return Launch(**kernel, cta_work=cta_work, row_ctas=problem.row_ctas, ctas=groups * problem.row_ctas, bytes=case.work.bytes)


def _sparse_prefill_backward(case: Case, shape: SparsePrefillBackwardShape, target: Target) -> Launch:
    """Return the launch of dQ over a chunk of tokens, with that of rows for dkv and their sums after it, and the number of chunks.

    P and dS lie between both, and rows behind them. The sums, and the statistics before everything, take the time of their bytes; lists of
    tokens are left out, a fiftieth of the whole by the clock.
    """
    tokens = _chunk_of(shape)
    rounds, tiles, queries = ceil_div(shape.s_q, tokens), ceil_div(shape.topk, TILE_KEYS), tokens * shape.h_q * ELEMENT_BYTES
    scores = 2.0 * queries * tiles * TILE_KEYS
    rows = float(tokens * shape.topk * shape.d_qk * ELEMENT_BYTES)
    dkv = sparse_prefill_dkv.config_for(shape.d_qk, shape.h_q)
    row_ctas, _, groups = sparse_prefill_dq.grid(shape.h_q, tokens, target.sm_count)
    column_ctas, _, key_groups = dkv.grid(tokens, target.sm_count)
    after = Launch(
        **_kernel("sparse_prefill_dkv", dkv, target),
        cta_work=sparse_prefill_work(tokens, key_groups, tiles),
        row_ctas=column_ctas,
        ctas=key_groups * column_ctas,
        bytes=scores + rows + queries * (shape.d_qk + D_V),
        combine=Combine(shape.s_kv, ROW_SUMS_PER_SM, rows + 2.0 * queries * D_V, cold=True),
        rounds=rounds,
    )
    return Launch(
        **_kernel("sparse_prefill_dq", sparse_prefill_dq.config_for(target.arch, shape.d_qk, shape.h_q), target),
        cta_work=sparse_prefill_work(tokens, groups, tiles),
        row_ctas=row_ctas,
        ctas=groups * row_ctas,
        bytes=scores + queries * (2.0 * shape.d_qk + D_V),
        after=after,
        rounds=rounds,
    )


def _chunk_of(shape: SparsePrefillBackwardShape) -> int:
    """Return the tokens of a chunk, all chunks alike, with the workspace that a call takes unless it says otherwise."""
    token = shape.topk * (2 * shape.h_q + shape.d_qk) * ELEMENT_BYTES
    most = max(int((DEFAULT_WORKSPACE - shape.s_kv * shape.d_qk * 4) // token), 1)
    return ceil_div(shape.s_q, ceil_div(shape.s_q, most))


def _dense_prefill(case: Case, shape: DensePrefillShape, target: Target) -> Launch:
    problem = dense_prefill.DensePrefillProblem(
        target.arch, case.dtype, shape.d_qk, shape.batch, shape.h_q, shape.h_kv, max(shape.lengths, default=0)
    )
    config = problem.config
    kernel = _kernel("masked_prefill" if shape.shown else "dense_prefill", config, target)
    ctas = problem.grid(target.sm_count)[0]
    tiles = PrefillTiles(dense_prefill.TILE_ROWS[target.arch.name], config.tile_keys(target.arch), shape.causal, shape.cached)
    deal = sorted_prefill_order if problem.sorts_sequences else dense_prefill_order
    cta_work = prefill_work(tiles, deal(tiles, shape.lengths, shape.h_q, ctas // config.cluster))
    return Launch(**kernel, cta_work=cta_work, row_ctas=config.cluster, ctas=ctas, bytes=case.work.bytes)


def _dense_prefill_backward(case: Case, shape: DensePrefillBackwardShape, target: Target) -> Launch:
    """Return the launch of dQ, with that of dK and dV after it. Both read every operand; the second writes two of the three results.

    Where dK and dV of a block of keys are an item each, both are counted as one, which is what a block is here.
    """
    arch, longest, group = target.arch, max(shape.lengths, default=0), shape.h_q // shape.h_kv
    rows = dense_prefill_dq.DensePrefillDqProblem(arch, case.dtype, shape.d_qk, shape.batch, shape.h_q, shape.h_kv, longest)
    keys = dense_prefill_dkdv.DensePrefillDkdvProblem(arch, case.dtype, shape.d_qk, shape.batch, shape.h_kv, longest)
    row_kernel, key_kernel = _kernel("dense_prefill_dq", rows.config, target), _kernel("dense_prefill_dkdv", keys.config, target)
    row_ctas, key_ctas = rows.grid(target.sm_count)[0], keys.grid(target.sm_count)[0]
    row_tiles = PrefillTiles(dense_prefill_dq.TILE_ROWS, dense_prefill_dq.TILE_KEYS[arch.name][shape.d_qk], shape.causal)
    tile_keys, tile_queries = (sizes[arch.name][shape.d_qk] for sizes in (dense_prefill_dkdv.TILE_KEYS, dense_prefill_dkdv.TILE_QUERIES))
    key_tiles = KeyTiles(tile_keys, tile_queries, shape.causal, longest=longest)
    deal = sorted_prefill_order if rows.sorts_sequences else dense_prefill_order
    row_work = prefill_work(row_tiles, deal(row_tiles, shape.lengths, shape.h_q, row_ctas))
    key_work = prefill_work(key_tiles, dense_prefill_order(key_tiles, shape.lengths, shape.h_kv, key_ctas))
    key_work = tuple(CtaWork(work.blocks * group, work.pieces) for work in key_work)
    after = Launch(**key_kernel, cta_work=key_work, row_ctas=1, ctas=key_ctas, bytes=case.work.bytes)
    return Launch(**row_kernel, cta_work=row_work, row_ctas=1, ctas=row_ctas, bytes=case.work.bytes, after=after)


def _combine_after(problem: DenseDecodeProblem | SparseDecodeProblem, num_parts: int, work: DecodeWork, sm_count: int) -> Combine | None:
    """Return the combine after a decode; None if the plan cannot split, because combine is not launched then."""
    batch, s_q, h_q = problem.batch, problem.s_q, problem.h_q
    if not accumulator_rows(batch, num_parts, problem.max_splits):
        return None
    rows = s_q * h_q
    merged = work.splits * rows * ACCUMULATOR_ROW_BYTES + work.cut_requests * rows * ELEMENT_BYTES * D_V
    shape = CombineShape(batch, s_q, h_q, work.most_splits)
    return _combine_grid(shape, work.cut_requests * s_q, float(merged), sm_count)


def _combine(case: Case, shape: CombineShape, target: Target) -> Combine:
    return replace(_combine_grid(shape, shape.batch * shape.s_q, case.work.bytes, target.sm_count), cold=True)


def _combine_grid(shape: CombineShape, cut: int, moved: float, sm_count: int) -> Combine:
    """Return combine on its grid. cut: query tokens with more than one split, assumed evenly spread. moved: bytes in all.

    A CTA takes query tokens at a stride, looks up 32 of them at once, and loads the lse and then the rows of each cut token.
    """
    across, head_blocks, columns = combine_spec.grid(shape.batch, shape.s_q, shape.h_q, sm_count)
    tokens, merges = ceil_div(shape.batch * shape.s_q, across), ceil_div(cut, across)
    heads = ceil_div(shape.h_q, head_blocks)
    return Combine(
        across * head_blocks * columns,
        COMBINE_CTAS_PER_SM,
        moved,
        lookups=ceil_div(tokens, _TOKENS_PER_LOOKUP),
        merges=merges,
        splits=shape.splits,
        heads=heads,
        columns=columns,
    )


def _merge_states(case: Case, shape: MergeShape, target: Target) -> Combine:
    """Return merge_states: one warp a row, as in combine."""
    tokens, head_blocks, _ = merge_states.grid(1, shape.tokens, shape.h_q)
    return Combine(tokens * head_blocks, COMBINE_CTAS_PER_SM, case.work.bytes, cold=True)


def _cache_write(case: Case, shape: CacheWriteShape, target: Target) -> Combine:
    """Return cache_write: one warp a key."""
    return Combine(cache_write.grid(shape.tokens)[0], CACHE_WRITE_CTAS_PER_SM, case.work.bytes, cold=True)


def _cache_insert(case: Case, shape: CacheInsertShape, target: Target) -> Combine:
    """Return cache_insert: warps that take keys as cache_write does, with a position ahead of its angles, and CTAs that take queries."""
    ctas = cache_insert.grid(shape.tokens, shape.h_q)[0]
    return Combine(ctas, CACHE_INSERT_CTAS_PER_SM, case.work.bytes, cold=True)


def _index_write(case: Case, shape: IndexWriteShape, target: Target) -> Combine:
    """Return index_write: 16 lanes a row."""
    rows = shape.tokens * max(shape.h_q, 1)
    return Combine(index_write.grid(rows)[0], INDEX_WRITE_CTAS_PER_SM[not shape.h_q], case.work.bytes, cold=True)


def _topk_indices(case: Case, shape: TopkShape, target: Target) -> Combine:
    """Return topk_indices: CTAs that read their part of a row once, with look-ups in one another's counts behind it."""
    once = topk_indices.streams(target.arch)
    config = topk_indices.config_for(shape.rows, shape.columns, shape.topk, target.sm_count, once=once)
    ctas = topk_indices.grid(shape.rows, config.cluster)[0]
    return Combine(ctas, topk_indices.BLOCKS_PER_SM, shape.work.bytes, cold=True)


def _indexer_topk(case: Case, shape: IndexerShape, target: Target) -> Launch:
    """Return the logits of as many query tokens as the workspace holds, with their selection behind it, and how often both are launched.

    Keys are read again each time.
    """
    requests, tokens = (shape.tokens, 1) if shape.paged else (1, shape.tokens)
    chunks = divide(requests, tokens, shape.context, shape.topk, target.sm_count).chunks
    rounds = sum(1 for _ in chunks.slices())
    problem = MqaLogitsProblem(shape.paged, shape.h_q, min(chunks.requests_each, requests), min(chunks.tokens_each, tokens), shape.context)
    keys = replace(shape, tokens=chunks.rows)
    return Launch(
        **_kernel("mqa_logits", problem.config, target),
        cta_work=logits_work(problem, target.sm_count),
        row_ctas=1,
        ctas=problem.grid(target.sm_count)[0],
        bytes=keys.work.bytes,
        combine=replace(_topk_indices(case, shape.selection(chunks.rows), target), cold=False),
        rounds=rounds,
    )


_LAUNCHES: Mapping[type, Callable[..., Launch | Combine]] = {
    DecodeShape: _dense_decode,
    SparseDecodeShape: _sparse_decode,
    SparsePrefillShape: _sparse_prefill,
    SparsePrefillBackwardShape: _sparse_prefill_backward,
    DensePrefillShape: _dense_prefill,
    DensePrefillBackwardShape: _dense_prefill_backward,
    CombineShape: _combine,
    MergeShape: _merge_states,
    CacheWriteShape: _cache_write,
    CacheInsertShape: _cache_insert,
    IndexWriteShape: _index_write,
    TopkShape: _topk_indices,
    IndexerShape: _indexer_topk,
}
