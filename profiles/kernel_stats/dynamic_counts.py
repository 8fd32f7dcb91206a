"""Warp instructions that a kernel executes per tile of keys, of its PTX or of its machine code, by role and class.

A kernel runs twice on the simulated device, over FEW and over MANY blocks of keys. The difference gives the slope per 64 keys of 64 query
rows. The rest is the fixed part of one CTA (of each CTA of a pair) with one request. dense_prefill_dkdv streams query rows over the keys
of an item: its blocks are of rows, and where dK and dV are an item each, of both.
"""

from __future__ import annotations

import tomllib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from math import lcm
from pathlib import Path
from typing import Protocol

from cute_mla.manifest import KernelEntry
from cute_mla.runtime.current import simulate
from cute_mla.spec.arch import ARCHS, Arch
from cute_mla.spec.cache_format import FORMATS
from cute_mla.spec.dense_decode import FEW_HEADS, FEW_ROWS, LATENT, OPERANDS, TILE_ROWS
from cute_mla.spec.dense_prefill import HEAD_DIMS, variant
from cute_mla.spec.dense_prefill import TILE_ROWS as PREFILL_ROWS
from cute_mla.spec.dense_prefill_dkdv import TILE_KEYS as DKDV_KEYS
from cute_mla.spec.dense_prefill_dkdv import TILE_QUERIES as DKDV_QUERIES
from cute_mla.spec.dense_prefill_dq import TILE_KEYS as DQ_KEYS
from cute_mla.spec.dense_prefill_dq import TILE_ROWS as DQ_ROWS
from cute_mla.spec.masked_prefill import HEAD_DIMS as MASKED_HEAD_DIMS
from cute_mla.spec.mla import D_LATENT, D_QK, DENSE_DIMS, DTYPES
from cute_mla.spec.mqa_logits import HEAD_TILES, ITEM_BLOCKS, MqaLogitsConfig
from cute_mla.spec.mqa_logits import TILE_KEYS as LOGITS_KEYS
from cute_mla.spec.sparse_decode import KERNELS
from cute_mla.spec.split_plan import TILE_KEYS
from cute_mla.testing.cases.base import BaseCase
from cute_mla.testing.operations import operation
from cute_mla.testing.operations.dense_decode.case import DenseDecodeCase
from cute_mla.testing.operations.dense_prefill.case import DensePrefillCase
from cute_mla.testing.operations.dense_prefill_backward.case import DensePrefillBackwardCase, DqCase
from cute_mla.testing.operations.mqa_logits.case import MqaLogitsCase
from cute_mla.testing.operations.sparse_decode.case import Pool, SparseDecodeCase
from cute_mla.testing.operations.sparse_prefill.case import SparsePrefillCase
from cute_mla.testing.operations.sparse_prefill_backward.case import DkvCase, SparsePrefillBackwardCase

from ..launches.products import prefill_variant

FEW, MANY = 8, 16  # blocks of 64 keys: even, and more than the stages of any pipeline
PAGE_SIZE = 64  # of index caches
WINDOW = 2  # tiles of a first cache whose format is not the second one's: the keys of DeepSeek-V4.1's window
_FLASHMLA = Path(__file__).resolve().parents[1] / "definitions" / "flashmla_counts.toml"


@dataclass(frozen=True)
class BaselineCounts:
    """Slope and fixed part of another library's kernel, all roles together."""

    title: str
    slope: float
    fixed: float


@dataclass(frozen=True)
class DynamicCounts:
    """Warp instructions of one kernel; the fields are those of `show kernel --counts --json`.

    slope: by role, then by class, per 64 keys of 64 rows. fixed: by role, the instructions that do not depend on the keys.
    peer: FlashMLA's kernel for the same use, if there is one; its PTX was counted. code: "ptx" or "sass".
    """

    slope: dict[str, dict[str, float]]
    fixed: dict[str, float]
    peer: BaselineCounts | None
    code: str = "ptx"

    @property
    def slope_total(self) -> float:
        """Sum of the slope over all roles and classes."""
        return sum(sum(classes.values()) for classes in self.slope.values())

    @property
    def fixed_total(self) -> float:
        """Sum of the fixed part over all roles."""
        return sum(self.fixed.values())


def dynamic_counts(entry: KernelEntry, code: str = "ptx") -> DynamicCounts | None:
    """Run a built kernel on the simulated device and count its instructions; None for a kernel without a loop over keys.

    code: "ptx" or "sass", the machine code.
    """
    make = case_of(entry)
    if make is None:
        return None
    least, most = runs_of(entry)
    few, many = (_executed(entry, make(blocks * TILE_KEYS), code) for blocks in (least, most))
    tiles = _row_tiles(entry, make(least * TILE_KEYS))
    slope, fixed = {}, {}
    for role in many:
        difference = Counter(many[role])
        difference.subtract(few[role])
        slope[role] = {name: number / (most - least) / tiles for name, number in difference.most_common() if number}
        fixed[role] = few[role].total() / tiles - least * sum(slope[role].values())
    return DynamicCounts(slope, fixed, baseline_counts(entry) if code == "ptx" else None, code)


def _executed(entry: KernelEntry, case: BaseCase, code: str) -> dict[str, Counter[str]]:
    tensors = operation(case).make_tensors(case, "cpu")
    with simulate(entry.arch, case.sm_count, code=code) as device:
        device.count_by_role()
        operation(case).call(case, tensors, None)
    assert device.counts is not None
    return device.counts[entry.name]


def keys_of_block(entry: KernelEntry) -> int:
    """Return the keys of a block of a kernel: those of a tile of its main loop. Of dense_prefill_dkdv, the query rows."""
    if entry.op == "dense_prefill_dq":
        return DQ_KEYS[entry.arch][int(entry.config["d_qk"])]
    if entry.op == "dense_prefill_dkdv":
        return DKDV_QUERIES[entry.arch][int(entry.config["d_qk"])]
    if entry.op == "mqa_logits":
        return LOGITS_KEYS
    return prefill_variant(entry.config).tile_keys(ARCHS[entry.arch]) if entry.op in ("dense_prefill", "masked_prefill") else TILE_KEYS


def runs_of(entry: KernelEntry) -> tuple[int, int]:
    """Return the blocks of 64 keys of the two runs: FEW and MANY, or other numbers where whole tiles do not fill them."""
    step = lcm(keys_of_block(entry), TILE_KEYS) // TILE_KEYS
    return (2 * step, 4 * step) if FEW % step else (FEW, MANY)


def _row_tiles(entry: KernelEntry, case: BaseCase) -> int:
    """Return the tiles of 64 query rows: one for each CTA of a decode, two or four for each CTA of dense prefill; of dkdv, of 64 keys."""
    if entry.op == "dense_prefill_dkdv":
        return DKDV_KEYS[entry.arch][int(entry.config["d_qk"])] // TILE_ROWS
    requests, tokens, heads, _ = case.q_shape
    return -(-requests * tokens * heads // TILE_ROWS)


class CaseFactory(Protocol):
    """Factory of cases that a kernel serves with one CTA or one CTA pair."""

    def __call__(self, keys: int, pieces: int = 1) -> BaseCase:
        """Return a case over so many keys, of dkdv over so many query rows. pieces: requests, query tokens or items, each over as many."""


def case_of(entry: KernelEntry) -> CaseFactory | None:
    """Return the factory of cases for a kernel; None for a kernel without a loop over keys."""
    arch = ARCHS[entry.arch]
    for make in _CASES.get(entry.op, lambda _: iter(()))(arch):
        if entry.name.endswith(f"_{arch.name}_{make(FEW * TILE_KEYS).problem(arch).config.name}"):
            return make
    return None


def _dense_decode(arch: Arch) -> Iterator[CaseFactory]:
    variants = [*((operands, D_QK) for operands in OPERANDS), *((LATENT, d_qk) for d_qk in DENSE_DIMS if d_qk != D_QK)]
    for dtype, (operands, d_qk), heads in product(DTYPES, variants, (*_HEADS, *FEW_ROWS)):
        yield lambda keys, pieces=1, d=dtype, c=d_qk, o=operands, h=heads: DenseDecodeCase(  # type: ignore[misc]
            d, batch=pieces, s_k=keys, h_q=h, d_qk=c, operands=o, outputs="given", sm_count=-(-h // TILE_ROWS)
        )


def _sparse_decode(arch: Arch) -> Iterator[CaseFactory]:
    for (dtype, kernels), heads in product(KERNELS, (*_HEADS, FEW_HEADS)):
        yield partial(_sparse_decode_case, dtype, kernels, heads)


def _sparse_decode_case(dtype: str, kernels: str, heads: int, keys: int, pieces: int = 1) -> SparseDecodeCase:
    """Return a case over one cache, or over a window of a first one and the rest of a second one whose format is its own."""
    first = FORMATS[kernels].beside
    numbers = (WINDOW * TILE_KEYS, keys - WINDOW * TILE_KEYS) if first else (keys,)
    main, *extra = (Pool(number, number) for number in numbers)
    case = SparseDecodeCase(dtype, batch=pieces, cache=first or kernels, h_q=heads, main=main, sm_count=-(-heads // TILE_ROWS))
    return replace(case, extra_cache=kernels, extra=extra[0]) if extra else case


def _sparse_prefill(arch: Arch) -> Iterator[CaseFactory]:
    for d_qk, heads in product((D_QK, D_LATENT), _HEADS):
        yield lambda keys, pieces=1, c=d_qk, h=heads: SparsePrefillCase(  # type: ignore[misc]
            s_q=pieces, d_qk=c, h_q=h, s_kv=keys, topk=keys, sm_count=h // TILE_ROWS
        )


def _sparse_prefill_dq(arch: Arch) -> Iterator[CaseFactory]:
    for d_qk, heads in product((D_QK, D_LATENT), _HEADS):
        yield partial(_sparse_gradient_case, SparsePrefillBackwardCase, d_qk, heads)


def _sparse_prefill_dkv(arch: Arch) -> Iterator[CaseFactory]:
    for d_qk, heads in product((D_QK, D_LATENT), _HEADS):
        yield partial(_sparse_gradient_case, DkvCase, d_qk, heads)


def _sparse_gradient_case(
    kind: type[SparsePrefillBackwardCase], d_qk: int, heads: int, keys: int, pieces: int = 1
) -> SparsePrefillBackwardCase:
    return kind(s_q=pieces, d_qk=d_qk, h_q=heads, s_kv=keys, topk=keys, sm_count=heads // TILE_ROWS)


def _dense_prefill(arch: Arch) -> Iterator[CaseFactory]:
    for dtype, d_qk in product(DTYPES, HEAD_DIMS):
        yield lambda keys, pieces=1, d=dtype, c=d_qk: DensePrefillCase(  # type: ignore[misc]
            d,
            d_qk=c,
            lengths=((PREFILL_ROWS[arch.name], keys),) * pieces,
            sm_count=variant(arch, d, c).cluster,
        )


def _masked_prefill(arch: Arch) -> Iterator[CaseFactory]:
    for d_qk in MASKED_HEAD_DIMS:
        yield lambda keys, pieces=1, c=d_qk: DensePrefillCase(  # type: ignore[misc]
            d_qk=c, lengths=((PREFILL_ROWS[arch.name], keys),) * pieces, mask="random", sm_count=1
        )


def _dense_prefill_dq(arch: Arch) -> Iterator[CaseFactory]:
    for d_qk in DQ_KEYS[arch.name]:
        yield lambda keys, pieces=1, c=d_qk: DqCase(d_qk=c, lengths=((DQ_ROWS, keys),) * pieces, sm_count=1)  # type: ignore[misc]


def _dense_prefill_dkdv(arch: Arch) -> Iterator[CaseFactory]:
    for d_qk in DKDV_QUERIES[arch.name]:
        yield lambda keys, pieces=1, c=d_qk: DensePrefillBackwardCase(  # type: ignore[misc]
            d_qk=c, lengths=((keys, DKDV_KEYS[arch.name][c]),) * pieces, sm_count=1
        )


def _mqa_logits(arch: Arch) -> Iterator[CaseFactory]:
    for paged, head_tile in product((False, True), HEAD_TILES):
        yield partial(_mqa_logits_case, MqaLogitsConfig(paged, head_tile))


def _mqa_logits_case(config: MqaLogitsConfig, keys: int, pieces: int = 1) -> MqaLogitsCase:
    """Return a case whose items are of two row blocks, or with pages of a request's query token."""
    requests, tokens, page_size = (pieces, 1, PAGE_SIZE) if config.paged else (1, pieces * ITEM_BLOCKS * config.block_tokens, None)
    return MqaLogitsCase(
        heads=config.head_tile,
        requests=requests,
        tokens=tokens,
        keys=keys,
        page_size=page_size,
        windows="whole",
        clean=False,
        values="normal",
        sm_count=1,
    )


_HEADS = (2 * TILE_ROWS, TILE_ROWS)  # that together select every variant
_CASES: dict[str, Callable[[Arch], Iterator[CaseFactory]]] = {
    "dense_decode": _dense_decode,
    "sparse_decode": _sparse_decode,
    "sparse_prefill": _sparse_prefill,
    "sparse_prefill_dq": _sparse_prefill_dq,
    "sparse_prefill_dkv": _sparse_prefill_dkv,
    "dense_prefill": _dense_prefill,
    "masked_prefill": _masked_prefill,
    "dense_prefill_dq": _dense_prefill_dq,
    "dense_prefill_dkdv": _dense_prefill_dkdv,
    "mqa_logits": _mqa_logits,
}


def baseline_counts(entry: KernelEntry) -> BaselineCounts | None:
    """Return the counts of FlashMLA's kernel for the same architecture, op and configuration fields that the file names, or None."""
    with _FLASHMLA.open("rb") as file:
        kernels = tomllib.load(file)["kernel"]
    for kernel in kernels:
        if (kernel["arch"], kernel["op"]) == (entry.arch, entry.op) and kernel["config"].items() <= entry.config.items():
            return BaselineCounts(kernel["title"], kernel["slope"], kernel["fixed"])
    return None
