"""From a benchmark row to what the model is asked: which kernel runs, on how many CTAs, with which parts, and what follows it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from ..spec import cache_write, dense_prefill, merge_states
from ..spec import combine as combine_spec
from ..spec.arch import ARCHS, Arch
from ..spec.cache_rows import KEYS_PER_BLOCK
from ..spec.dense_decode import DenseDecodeProblem
from ..spec.mla import D_V, ELEMENT_BYTES, ceil_div
from ..spec.sparse_decode import SparseDecodeProblem
from ..spec.sparse_prefill import SparsePrefillProblem
from ..spec.split_plan import TILE_KEYS, accumulator_rows
from .model import Combine, Launch
from .partition import Split, item_parts, split_parts, token_parts
from .recorded_counts import COUNTED_DTYPE, Counts
from .rows import Case
from .shapes import (
    CacheWriteShape,
    CombineShape,
    DecodeShape,
    DensePrefillShape,
    MergeShape,
    SparseDecodeShape,
    SparsePrefillShape,
)
from .tile_costs import PREFILL_KEYS, block_of

CACHE_WRITE_CTAS_PER_SM = 12  # 128 threads of 40 registers
COMBINE_CTAS_PER_SM = 2  # 256 threads of 105 registers, and the launch asks for two
ACCUMULATOR_ROW_BYTES = 4 * (D_V + 1)
FLAGGED = ("dense_decode", "sparse_decode")  # ops whose calls take batch_invariant
_LOOKED_UP_AT_ONCE = 32  # query tokens, one a lane

Recorded = Mapping[str, Counts]


class NoModel(ValueError):
    """A row that the model says nothing of; the message is the reason."""


def launch_of(case: Case, arch_name: str, sm_count: int, recorded: Recorded, *, batch_invariant: bool = False) -> Launch | Combine:
    """What a row runs on so many SMs. NoModel where the kernel's counts are not recorded, or the op has no model or no such flag."""
    make = _LAUNCHES.get(type(case.shape))
    if make is None:
        raise NoModel(f"no model of {case.op}")
    if batch_invariant and case.op not in FLAGGED:
        raise NoModel(f"{case.op} has no flag batch_invariant")
    flag = {"batch_invariant": True} if batch_invariant else {}
    return make(case, case.shape, ARCHS[arch_name], sm_count, recorded, **flag)


def kernel_name(op: str, arch: Arch, config: Any) -> str:
    """As in the manifest."""
    return f"{op}_{arch.name}_{config.name}"


def _kernel(op: str, arch: Arch, config: Any, recorded: Recorded) -> dict[str, Any]:
    """What a launch says of its kernel."""
    name = kernel_name(op, arch, config)
    if name not in recorded:
        raise NoModel(f"the instructions of {name} are not recorded ({COUNTED_DTYPE} and wide rows are)")
    fields = asdict(config)
    return {
        "op": op,
        "arch": arch.name,
        "config": fields,
        "block": block_of(op, arch.name, fields),
        "counts": recorded[name],
        "kernel": name,
    }


def _dense_decode(case: Case, shape: DecodeShape, arch: Arch, sm_count: int, recorded: Recorded, batch_invariant: bool = False) -> Launch:
    columns = ceil_div(max(shape.lengths, default=0), shape.page_size)
    problem = DenseDecodeProblem(
        arch,
        case.dtype,
        shape.batch,
        shape.s_q,
        shape.h_q,
        shape.h_kv,
        shape.page_size,
        columns,
        batch_invariant=batch_invariant,
        operands=shape.operands,
    )
    return _decode(case, problem, shape.lengths, shape.h_kv, sm_count, recorded)


def _sparse_decode(
    case: Case, shape: SparseDecodeShape, arch: Arch, sm_count: int, recorded: Recorded, batch_invariant: bool = False
) -> Launch:
    problem = SparseDecodeProblem(
        arch, case.dtype, shape.cache, shape.batch, shape.s_q, shape.h_q, shape.topk, batch_invariant=batch_invariant
    )
    return _decode(case, problem, (shape.topk,) * shape.batch, shape.s_q, sm_count, recorded)


def _decode(
    case: Case, problem: DenseDecodeProblem | SparseDecodeProblem, lengths: Sequence[int], columns: int, sm_count: int, recorded: Recorded
) -> Launch:
    """Decode with requests of these lengths, and combine. columns: CTAs along the grid's second dimension."""
    kernel = _kernel(case.op, problem.arch, problem.config, recorded)
    num_parts = problem.num_parts(sm_count)
    split = split_parts(lengths, num_parts, problem.max_splits)
    combine = _combine_behind(problem, num_parts, split, sm_count)
    ctas = problem.row_ctas * columns * len(split.parts)
    return Launch(**kernel, parts=split.parts, row_ctas=problem.row_ctas, ctas=ctas, bytes=case.work.bytes, combine=combine)


def _sparse_prefill(case: Case, shape: SparsePrefillShape, arch: Arch, sm_count: int, recorded: Recorded) -> Launch:
    problem = SparsePrefillProblem(arch, case.dtype, shape.d_qk, 1, shape.s_q, shape.h_q)
    kernel = _kernel("sparse_prefill", arch, problem.config, recorded)
    groups = problem.grid(sm_count)[2]
    parts = token_parts(problem.tokens, groups, ceil_div(shape.topk, TILE_KEYS))
    return Launch(**kernel, parts=parts, row_ctas=problem.row_ctas, ctas=groups * problem.row_ctas, bytes=case.work.bytes)


def _dense_prefill(case: Case, shape: DensePrefillShape, arch: Arch, sm_count: int, recorded: Recorded) -> Launch:
    problem = dense_prefill.DensePrefillProblem(
        arch, case.dtype, shape.d_qk, shape.batch, shape.h_q, shape.h_kv, max(shape.lengths, default=0)
    )
    kernel = _kernel("dense_prefill", arch, problem.config, recorded)
    ctas = problem.grid(sm_count)[0]
    parts = item_parts(shape.lengths, shape.h_q, dense_prefill.TILE_ROWS[arch.name], PREFILL_KEYS, shape.causal, ctas)
    return Launch(**kernel, parts=parts, row_ctas=1, ctas=ctas, bytes=case.work.bytes)


def _combine_behind(problem: DenseDecodeProblem | SparseDecodeProblem, num_parts: int, split: Split, sm_count: int) -> Combine | None:
    """Of a decode; None where nothing can be cut, for then it is not launched."""
    batch, s_q, h_q = problem.batch, problem.s_q, problem.h_q
    if not accumulator_rows(batch, num_parts, problem.max_splits):
        return None
    rows = s_q * h_q
    merged = split.splits * rows * ACCUMULATOR_ROW_BYTES + split.cut_requests * rows * ELEMENT_BYTES * D_V
    shape = CombineShape(batch, s_q, h_q, split.most_splits)
    return _merging(shape, split.cut_requests * s_q, float(merged), sm_count)


def _combine(case: Case, shape: CombineShape, arch: Arch, sm_count: int, recorded: Recorded) -> Combine:
    return replace(_merging(shape, shape.batch * shape.s_q, case.work.bytes, sm_count), cold=True)


def _merging(shape: CombineShape, cut: int, moved: float, sm_count: int) -> Combine:
    """combine on its grid: a CTA takes every so-many-th query token, looks up which of them are cut, 32 at once (`cut` of all are, taken
    for spread evenly), and loads the lse and then the rows of each of those."""
    across, head_blocks, columns = combine_spec.grid(shape.batch, shape.s_q, shape.h_q, sm_count)
    tokens, merges = ceil_div(shape.batch * shape.s_q, across), ceil_div(cut, across)
    bytes_of_one = min(shape.h_q, combine_spec.ROWS_PER_BLOCK) * shape.splits * ACCUMULATOR_ROW_BYTES / columns
    loads = ceil_div(tokens, _LOOKED_UP_AT_ONCE) + 2 * max(merges, 1)
    return Combine(across * head_blocks * columns, COMBINE_CTAS_PER_SM, moved, merges * bytes_of_one, loads=loads)


def _merge_states(case: Case, shape: MergeShape, arch: Arch, sm_count: int, recorded: Recorded) -> Combine:
    """One warp a row, as combine; outs and lse are asked for at once."""
    tokens, head_blocks, _ = merge_states.grid(1, shape.tokens, shape.h_q)
    row = ELEMENT_BYTES * shape.head_dim + 4
    busiest = float(min(shape.h_q, merge_states.ROWS_PER_BLOCK) * (shape.states + 1) * row)
    return Combine(tokens * head_blocks, COMBINE_CTAS_PER_SM, case.work.bytes, busiest, cold=True, loads=2)


def _cache_write(case: Case, shape: CacheWriteShape, arch: Arch, sm_count: int, recorded: Recorded) -> Combine:
    """One warp a key: its slot, asked for together with its columns, and then the row that it writes."""
    ctas = cache_write.grid(shape.tokens)[0]
    busiest = case.work.bytes / shape.tokens * min(shape.tokens, KEYS_PER_BLOCK)
    return Combine(ctas, CACHE_WRITE_CTAS_PER_SM, case.work.bytes, busiest, cold=True, loads=1)


_LAUNCHES: Mapping[type, Callable[..., Launch | Combine]] = {
    DecodeShape: _dense_decode,
    SparseDecodeShape: _sparse_decode,
    SparsePrefillShape: _sparse_prefill,
    DensePrefillShape: _dense_prefill,
    CombineShape: _combine,
    MergeShape: _merge_states,
    CacheWriteShape: _cache_write,
}
