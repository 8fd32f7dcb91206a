"""Clocks of one CTA of the kernels without a loop over keys, run on small shapes.

These are combine, merge_states and topk_indices, and the writers: cache_write, cache_insert and index_write.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from cute_mla.manifest import KernelEntry, kernel_name
from cute_mla.runtime.artifacts import load_artifacts
from cute_mla.spec import cache_insert
from cute_mla.spec.arch import ARCHS
from cute_mla.spec.cache_rows import KEYS_PER_BLOCK, CacheRowsConfig, config_of
from cute_mla.spec.combine import BLOCKS_PER_SM, NARROW_BLOCKS, RESIDENT_BLOCKS, CombineConfig
from cute_mla.spec.index_write import ROWS_PER_BLOCK as INDEX_ROWS_PER_BLOCK
from cute_mla.spec.index_write import IndexWriteConfig
from cute_mla.spec.merge_states import ROWS_PER_BLOCK, MergeStatesConfig
from cute_mla.spec.row_sums import RowSumsConfig
from cute_mla.spec.topk_indices import BLOCKS_PER_SM as SELECTIONS_PER_SM
from cute_mla.spec.topk_indices import DTYPE as LOGITS
from cute_mla.spec.topk_indices import TopkIndicesConfig, config_for, streams

from ..launches.launch import Combine
from ..launches.of_rows import CACHE_INSERT_CTAS_PER_SM
from ..rows import Case
from ..shapes import (
    CacheInsertShape,
    CacheWriteShape,
    CombineShape,
    IndexerShape,
    IndexWriteShape,
    MergeShape,
    Shape,
    SparsePrefillBackwardShape,
    TopkShape,
)
from ..workloads import make_workload
from .cluster_run import run_call
from .constants import Constants
from .engine import Setting

Config = MergeStatesConfig | CacheRowsConfig | IndexWriteConfig | TopkIndicesConfig
_STREAMS = (MergeShape, CacheWriteShape, CacheInsertShape, IndexWriteShape, TopkShape)
_clocks: dict[tuple[str, Constants, Setting, Shape, int], int] = {}  # by kernel, circumstances, shape and CTA


def combine_clocks(combine: Combine, dtype: str, constants: Constants, setting: Setting) -> float:
    """Return the clocks of the busiest CTA of combine: its first look-up and merge, and what further ones add."""
    entry = load_artifacts().entry("combine", constants.arch, CombineConfig(dtype).name)
    sms = NARROW_BLOCKS // RESIDENT_BLOCKS if combine.columns == NARROW_BLOCKS else 1  # the fewest on which it divides columns so
    if not combine.merges:
        found = float(_run("combine", entry, dtype, _combine_shape(combine, 1, 0), constants, setting, sms))
    else:
        # a CTA takes whole rows only where there are more query tokens than CTAs
        least = 1 if combine.columns > 1 else 2
        few = _run("combine", entry, dtype, _combine_shape(combine, least, combine.splits), constants, setting, sms)
        more = combine.merges - least
        more_rows = _combine_shape(combine, least + 1, combine.splits)
        step = _run("combine", entry, dtype, more_rows, constants, setting, sms) - few if more else 0
        found = float(few + more * step)
    return found + (combine.lookups - 1) * constants.l2_latency


def _combine_shape(combine: Combine, tokens: int, splits: int) -> CombineShape:
    """Return the shape whose CTAs take so many query tokens each, with heads and columns divided as in `combine`."""
    return CombineShape(1 if combine.columns > 1 else BLOCKS_PER_SM, tokens, combine.heads, splits)


def clocks_after(case: Case, after: Combine, constants: Constants, setting: Setting) -> float:
    """Return the clocks of the busiest CTA or cluster of what follows a launch over keys: combine, or the selection of an indexer.

    row_sums takes the time of its bytes, of which a CTA gets 99.6 % by the clock: 0 here.
    """
    if isinstance(case.shape, SparsePrefillBackwardShape):
        return 0.0
    selection = _selection(case, after)
    return combine_clocks(after, case.dtype, constants, setting) if selection is None else stream_clocks(selection, constants, setting)


def _selection(case: Case, after: Combine) -> Case | None:
    """Return the selection of an indexer as a row of its own; None for a row of another op."""
    if not isinstance(case.shape, IndexerShape):
        return None
    rows = round(after.bytes / case.shape.selection(1).work.bytes)
    return replace(case, op="topk_indices", dtype=LOGITS, shape=case.shape.selection(rows))


def stream_kernel(case: Case, stream: Combine, constants: Constants) -> str:
    """Return the name of the kernel of a stream, or of what follows a launch over keys."""
    of = _selection(case, stream) or case
    if isinstance(of.shape, SparsePrefillBackwardShape):
        return kernel_name("row_sums", constants.arch, RowSumsConfig(of.shape.d_qk, of.dtype).name)
    if isinstance(of.shape, CombineShape) or not isinstance(of.shape, _STREAMS):
        return kernel_name("combine", constants.arch, CombineConfig(case.dtype).name)
    return kernel_name(of.op, constants.arch, _config_of(of, constants)[0].name)


def stream_clocks(case: Case, constants: Constants, setting: Setting) -> float:
    """Return the clocks of one CTA of a row of merge_states or a writer, or of a cluster of topk_indices. ValueError for another op."""
    if isinstance(case.shape, CacheInsertShape):
        return _insert_clocks(case, case.shape, constants, setting)
    config, small, sms = _config_of(case, constants)
    entry = load_artifacts().entry(case.op, ARCHS[constants.arch].name, config.name)
    return float(_run(case.op, entry, case.dtype, small, constants, setting, sms))


def _config_of(case: Case, constants: Constants) -> tuple[Config, Shape, int]:
    """Return the variant of a stream's kernel, the shape of one of its CTAs or clusters, and the SMs on which that has this variant."""
    shape, sms = case.shape, 1
    config: Config
    if isinstance(shape, MergeShape):
        config = MergeStatesConfig(case.dtype, shape.head_dim)
        small: Shape = replace(shape, tokens=1, h_q=min(shape.h_q, ROWS_PER_BLOCK))
    elif isinstance(shape, CacheWriteShape):
        config = config_of(shape.format, case.dtype)
        small = replace(shape, tokens=min(shape.tokens, KEYS_PER_BLOCK))
    elif isinstance(shape, IndexWriteShape):
        config = IndexWriteConfig("queries" if shape.h_q else "keys")
        small = replace(shape, tokens=min(shape.tokens, INDEX_ROWS_PER_BLOCK))
    elif isinstance(shape, TopkShape):
        sms, once = constants.sm_count, streams(ARCHS[constants.arch])
        config = config_for(shape.rows, shape.columns, shape.topk, sms, once=once)
        small = replace(shape, rows=2 if config.stream else 1)
        if config != config_for(1, shape.columns, shape.topk, sms, once=once):
            sms = max(config.cluster // SELECTIONS_PER_SM, 1)  # on which so few rows have the variant of many
    elif isinstance(shape, CacheInsertShape):
        config = cache_insert.config_of(shape.format, case.dtype)
        small = replace(shape, tokens=min(shape.tokens, KEYS_PER_BLOCK))
    else:
        raise ValueError(f"{case.op} is no stream: it has a loop over keys")
    return config, small, sms


def _insert_clocks(case: Case, shape: CacheInsertShape, constants: Constants, setting: Setting) -> float:
    """Return the clocks of a CTA of cache_insert: of keys or of queries, whichever takes longer if all run at once, else the mean of all.

    CTAs of keys start first, and SMs that have done theirs take queries.
    """
    config, small, _ = _config_of(case, constants)
    entry = load_artifacts().entry(case.op, ARCHS[constants.arch].name, config.name)
    ctas, of_keys = cache_insert.grid(shape.tokens, shape.h_q)[0], cache_insert.key_blocks(shape.tokens)
    keys = _run(case.op, entry, case.dtype, small, constants, setting)
    if ctas == of_keys:
        return float(keys)
    queries = _run(case.op, entry, case.dtype, small, constants, setting, cta=1)
    if ctas <= CACHE_INSERT_CTAS_PER_SM * constants.sm_count:
        return float(max(keys, queries))
    return (of_keys * keys + (ctas - of_keys) * queries) / ctas


def _run(
    op: str, entry: KernelEntry, dtype: str, shape: Shape, constants: Constants, setting: Setting, sm_count: int = 1, cta: int = 0
) -> int:
    key = entry.cubin_sha256, constants, setting, shape, cta
    if key not in _clocks:
        case = Case(op, "", "", "", 1, dtype, shape, 0, "", 0.0, None)

        def call() -> None:
            workload = make_workload(case, torch.device("cpu"), 0, 1)
            workload.call(workload.sets[0])

        _clocks[key] = run_call(entry, sm_count, constants, setting, call, cta).end
    return _clocks[key]
