"""Terms of the orders of the backward of sparse prefill, in the sequence of its launches, as spec/orders.py takes them.

d_sink is a sum over tokens by torch, and has no order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .arch import SM90, SM100, Arch
from .dense_decode import TILE_ROWS
from .key_lists import KeyListsConfig
from .row_statistics import RowStatisticsConfig
from .row_sums import RowSumsConfig
from .sparse_prefill import SparsePrefillConfig
from .sparse_prefill_dkv import SparsePrefillDkvConfig
from .split_plan import TILE_KEYS


def _row_statistics(config: RowStatisticsConfig, arch: Arch) -> dict[str, Any]:
    return {"dtype": config.dtype, "delta": "fp32 fma over the chunks of a lane, then a tree over lanes; of out as stored"}


def _sparse_prefill_dq(config: SparsePrefillConfig, arch: Arch) -> dict[str, Any]:
    return {
        "revision": 2 if arch is SM90 else 1,  # columns of a score ascend
        "dtype": config.dtype,
        "d_qk": config.d_qk,
        "rows": f"{config.cluster} CTAs" if arch is SM100 else "any",
        "keys": f"tiles of {TILE_KEYS}, as given",
        "p": f"exp2 of an fp32 fma with lse; over the scale, rounded to {config.dtype}",
        "ds": f"of fp32 P, rounded to {config.dtype}",
    }


def _sparse_prefill_dkv(config: SparsePrefillDkvConfig, arch: Arch) -> dict[str, Any]:
    return {"dtype": config.dtype, "d_qk": config.d_qk, "heads": f"tiles of {TILE_ROWS}, {config.head_tiles} of them", "rows": config.dtype}


def _key_lists(config: KeyListsConfig, arch: Arch) -> dict[str, Any]:
    return {"entries": "tokens ascending, of a token its slots"}


def _row_sums(config: RowSumsConfig, arch: Arch) -> dict[str, Any]:
    return {"columns": config.columns, "rows": "one after the other in fp32, over chunks", "out": config.out_dtype}


def _of(op: str, terms: Callable[[Any, Arch], dict[str, Any]]) -> Callable[[Any, Arch], dict[str, Any]]:
    """Return the terms with those of every op."""
    return lambda config, arch: {"op": op, "revision": 1, "arch": arch.name, **terms(config, arch)}


TERMS: dict[str, Callable[[Any, Arch], dict[str, Any]]] = {
    terms.__name__[1:]: _of(terms.__name__[1:], terms)
    for terms in (_row_statistics, _sparse_prefill_dq, _sparse_prefill_dkv, _key_lists, _row_sums)
}
