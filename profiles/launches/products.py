"""Products of a block of keys of each attention kernel: padded FLOP on one SM, as 16-bit equivalents.

A block is a tile of 64 keys and 64 query rows, on RTX boards 16, in ops over a latent with more than 16 rows 64; on Blackwell two SMs share
64 keys and 128 rows, but for sparse prefill with up to 64 heads.
In dense prefill a block has 128 keys, or 80 or 64 with 256 columns on Hopper, and 128 or 256 rows; in its backward pass 128 rows and 96 or
128 keys for dQ, 128 keys and 64 to 128 rows for dK and dV. Logits of an indexer have tiles of 128 keys and 256 rows, 128 with pages.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from cute_mla.spec import dense_prefill, dense_prefill_dkdv, dense_prefill_dq, mqa_logits
from cute_mla.spec.arch import ARCHS, SM90, SM100, SM120
from cute_mla.spec.cache_format import FORMATS
from cute_mla.spec.dense_decode import FEW_HEADS, FP8, TILE_ROWS, TILINGS
from cute_mla.spec.dense_prefill import HEAD_DIMS as VALUE_COLUMNS_OF
from cute_mla.spec.dense_prefill import DensePrefillConfig
from cute_mla.spec.mla import D_QK, D_V, DENSE_DIMS
from cute_mla.spec.split_plan import TILE_KEYS

Config = Mapping[str, int | str]
Flops = dict[str, float]  # by product


def _product(rows: int, columns: int, depth: int) -> float:
    return 2.0 * rows * columns * depth


def _latent(d_qk: int, rows: int = TILE_ROWS) -> Flops:
    return {"S": _product(rows, TILE_KEYS, d_qk), "P V": _product(rows, DENSE_DIMS[d_qk].latent, TILE_KEYS)}


def _rows(arch: str, config: Config) -> int:
    return TILE_ROWS if config.get("rows64") else TILINGS[arch].rows


def _dense_decode(arch: str, config: Config) -> Flops:
    """Return those of dense decode. QGMMA products run at twice the rate, so their FLOP count half; rows of ones sum P.

    With keys on M, S of 64 keys takes the time of 128 on Blackwell, and 128 rows of ones sum P.
    """
    rows = int(config.get("few_rows", FEW_HEADS)) if config.get("few_heads") else _rows(arch, config)
    flops = _latent(int(config.get("d_qk", D_QK)), rows)
    if config["operands"] != FP8 or arch == SM120.name:
        alone = arch == SM100.name and config.get("few_heads")
        return {"S, at half of the rate": 2 * flops["S"], "P V": flops["P V"]} if alone else flops
    if config.get("few_heads"):
        return {"S, at half of the rate": flops["S"], "P V": flops["P V"] / 2, "sum of P": _product(128, rows, TILE_KEYS) / 2}
    sums = 4 * _product(64, 8, 32) / 2 if arch == SM90.name else 2.0 * 8 * 8192
    return {"S": _product(64, 64, D_QK) / 2, "P V": _product(64, D_V, 64) / 2, "sum of P": sums}


def _sparse_decode(arch: str, config: Config) -> Flops:
    return _latent(FORMATS[str(config["cache"])].d_qk, FEW_HEADS if config.get("few_heads") else _rows(arch, config))


def _sparse_prefill(arch: str, config: Config) -> Flops:
    """Return those of sparse prefill. S of 64 rows takes the time of 128 where a CTA works alone on Blackwell."""
    flops = _latent(int(config["d_qk"]), _rows(arch, config))
    if arch == SM100.name and config["cluster"] == 1:
        return {"S, at half of the rate": 2 * flops["S"], "P V": flops["P V"]}
    return flops


def _sparse_prefill_dq(arch: str, config: Config) -> Flops:
    d_qk = int(config["d_qk"])
    return {
        "S": _product(TILE_ROWS, TILE_KEYS, d_qk),
        "dP": _product(TILE_ROWS, TILE_KEYS, D_V),
        "dQ": _product(TILE_ROWS, d_qk, TILE_KEYS),
    }


def _sparse_prefill_dkv(arch: str, config: Config) -> Flops:
    """Return those of rows for dkv: a CTA has all heads, and its share of the columns."""
    heads, share = int(config["head_tiles"]) * TILE_ROWS, int(config["head_tiles"])
    return {
        "dS Q": _product(TILE_KEYS, int(config["d_qk"]), heads) / share,
        "P dO": _product(TILE_KEYS, D_V, heads) / share,
    }


def prefill_variant(config: Config) -> DensePrefillConfig:
    """Return the variant of dense prefill that a configuration of the manifest names."""
    usual = {"d_qk": 192, "cluster": 1}
    return DensePrefillConfig("bf16", *(int(config.get(name, number)) for name, number in usual.items()))


def _dense_prefill(arch: str, config: Config) -> Flops:
    variant = prefill_variant(config)
    keys, rows = variant.tile_keys(ARCHS[arch]), dense_prefill.TILE_ROWS[arch] // variant.cluster
    return {"S": _product(rows, keys, variant.d_qk), "P V": _product(rows, variant.d_v, keys)}


def _dense_prefill_dq(arch: str, config: Config) -> Flops:
    d_qk = int(config["d_qk"])
    rows, keys, d_v = dense_prefill_dq.TILE_ROWS, dense_prefill_dq.TILE_KEYS[arch][d_qk], VALUE_COLUMNS_OF[d_qk]
    return {"S": _product(rows, keys, d_qk), "dP": _product(rows, keys, d_v), "dQ": _product(rows, d_qk, keys)}


def _dense_prefill_dkdv(arch: str, config: Config) -> Flops:
    """Return those of dK and dV. S is computed twice where they are items of their own, on Blackwell with 256 columns."""
    d_qk = int(config["d_qk"])
    keys, rows, d_v = dense_prefill_dkdv.TILE_KEYS[arch][d_qk], dense_prefill_dkdv.TILE_QUERIES[arch][d_qk], VALUE_COLUMNS_OF[d_qk]
    sums = dense_prefill_dkdv.ITEM_SUMS[arch][d_qk]
    return {
        "S": sums * _product(keys, rows, d_qk),
        "dP": _product(keys, rows, d_v),
        "dV": _product(keys, d_v, rows),
        "dK": _product(keys, d_qk, rows),
    }


def _mqa_logits(arch: str, config: Config) -> Flops:
    rows = (1 if config["paged"] else mqa_logits.ITEM_BLOCKS) * mqa_logits.BLOCK_COLUMNS
    return {"scores": _product(mqa_logits.TILE_KEYS, rows, mqa_logits.COLUMNS) / 2}


_FLOPS: Mapping[str, Callable[[str, Config], Flops]] = {
    "dense_decode": _dense_decode,
    "sparse_decode": _sparse_decode,
    "sparse_prefill": _sparse_prefill,
    "sparse_prefill_dq": _sparse_prefill_dq,
    "sparse_prefill_dkv": _sparse_prefill_dkv,
    "dense_prefill": _dense_prefill,
    "masked_prefill": _dense_prefill,
    "dense_prefill_dq": _dense_prefill_dq,
    "dense_prefill_dkdv": _dense_prefill_dkdv,
    "mqa_logits": _mqa_logits,
}


def block_flops(op: str, arch: str, config: Config) -> Flops:
    """Return the FLOP of a block, by product, of the kernel with this configuration. ValueError for an op without a loop over keys."""
    if op not in _FLOPS:
        raise ValueError(f"op is {op!r}; blocks of keys have {', '.join(_FLOPS)}")
    return _FLOPS[op](arch, config)
