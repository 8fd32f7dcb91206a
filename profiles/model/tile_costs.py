"""Costs of each attention kernel per block of keys, derived in its README: products, bytes through each port, dependent stages.

A block is a tile of 64 keys and 64 query rows on one SM; on Blackwell two SMs share 64 keys and 128 rows, but for sparse prefill with up to
64 heads. In dense prefill a block has 128 keys, or 80 or 64 with 256 columns on Hopper, and 128 or 256 rows; in its backward pass 128 rows
and 96 or 128 keys for dQ, 128 keys and 64 to 128 rows for dK and dV. Logits of an indexer have tiles of 128 keys and 256 rows,
128 with pages, of which rows have one query token a request. Bytes are listed by cause, so that a sum can be checked. Instructions are
counted instead (`profiles/kernel_stats/golden_counts.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from ...spec import dense_prefill, dense_prefill_dkdv, dense_prefill_dq, mqa_logits
from ...spec.arch import ARCHS, SM90, SM100
from ...spec.cache_format import FORMATS, CacheFormat
from ...spec.dense_decode import FP8, FP8_CACHE, TILE_ROWS
from ...spec.dense_prefill import BOX_COLUMNS, DensePrefillConfig
from ...spec.dense_prefill import HEAD_DIMS as VALUE_COLUMNS_OF
from ...spec.masked_prefill import MASK_WORD_KEYS
from ...spec.mla import D_LATENT, D_QK, D_ROPE, D_V, ELEMENT_BYTES, LATENT_DIMS
from ...spec.split_plan import TILE_KEYS

E4M3_BYTES = 1
SECTOR = 32  # bytes, the least that a gather reads
FLOAT_BYTES = 4
_WORD_BYTES = 4  # a word of a mask of keys


@dataclass(frozen=True)
class Stage:
    """A dependent step. best, worst: its clocks, from the kernel's README. barriers: handovers to the next step."""

    name: str
    best: float
    worst: float
    barriers: int = 1


@dataclass(frozen=True)
class Block:
    """Costs of one block on one SM.

    keys, rows: extents of the block. units: number of 64-key, 64-row tiles, the unit of instruction counts.
    flops: padded FLOP by product, as 16-bit equivalents. smem: bytes through the shared-memory port, by cause.
    l2_bytes: bytes that the SM reads from L2. hbm_bytes: bytes from memory if all keys are read once, for one CTA of the row tiles.
    path: stages that depend on the previous block's, so that a block takes at least their sum. fill: stages that the first block adds.
    seam: stages between two pieces, if the README derives them. Without them pieces form one stream at best; at worst a piece ends
    before the next begins. lone: roles in which a single warp works. loads: dependent loads before the first keys are requested.
    """

    keys: int
    rows: int
    units: float
    flops: Mapping[str, float]
    smem: Mapping[str, float]
    l2_bytes: float
    hbm_bytes: float
    path: tuple[Stage, ...]
    fill: tuple[Stage, ...]
    seam: tuple[Stage, ...] = ()
    lone: tuple[str, ...] = ()
    loads: int = 3


Config = Mapping[str, int | str]

_PV_STEPS = TILE_KEYS // 16
_LATENT_ROW = D_QK * ELEMENT_BYTES
_P_BYTES = TILE_ROWS * TILE_KEYS * ELEMENT_BYTES
# sm90: S of a tile, then a softmax of about 240 instructions: dense_decode/README.md, `# SM90`, cycle argument
_SOFTMAX_SM90 = Stage("softmax", 486, 650)
_SOFTMAX_SM90_FP8 = Stage("softmax", 600, 700)
# sm100: read S, swap, swap maxima, exp2, write P; then the handover of S and P: dense_decode/README.md, `# SM100`
_SOFTMAX_SM100 = Stage("softmax and swaps", 950, 1050, barriers=0)
# the same with up to 64 heads of sparse prefill, where nothing is swapped: sparse_prefill/README.md, `# SM100, up to 64 heads`
_SOFTMAX_HEADS64 = Stage("softmax", 550, 750, barriers=0)
_HANDED_SM100 = Stage("S and P handed over", 200, 300, barriers=0)
# Selects and instructions for their predicates, two clocks each on the ALU pipe: 64 and 40 for the fragment of a lane on sm90, 128 and
# 32 for a row on sm100 (masked_prefill/README.md)
_MASK_CLOCKS = {SM90.name: 208, SM100.name: 320}
_MMA_16 = {SM90.name: 4096, SM100.name: 8192}


def _product(rows: int, columns: int, depth: int) -> float:
    return 2.0 * rows * columns * depth


def _latent_flops(d_qk: int) -> dict[str, float]:
    return {"S": _product(TILE_ROWS, TILE_KEYS, d_qk), "P V": _product(TILE_ROWS, LATENT_DIMS[d_qk].latent, TILE_KEYS)}


def _sm90_operands(d_qk: int, q_tiles_in_registers: int) -> dict[str, float]:
    """Return the operand bytes of 16-bit products: S reads K, and Q tiles outside registers; P V reads P twice, and V."""
    step = TILE_ROWS * 16 * ELEMENT_BYTES
    in_smem = d_qk // 16 - q_tiles_in_registers * BOX_COLUMNS // 16
    return {
        "S: K": d_qk // 16 * step,
        "S: Q from shared memory": in_smem * step,
        "P V: P for every 128 columns": LATENT_DIMS[d_qk].latent // 128 * _PV_STEPS * step,
        "P V: V": TILE_KEYS * LATENT_DIMS[d_qk].latent * ELEMENT_BYTES,
    }


def _sm100_operands(d_qk: int) -> dict[str, float]:
    """Return the operand bytes of 16-bit products on one SM of a pair.

    Q is in tensor memory, P stays between two products, and halves of S are exchanged through shared memory.
    """
    return {
        "S: K": d_qk // 32 * 2048,
        "P V: V": LATENT_DIMS[d_qk].latent // 64 * 4096,
        "P V: P": 4 * 2048,
        "P": _P_BYTES,
        "S swapped": 2 * TILE_ROWS * TILE_KEYS * FLOAT_BYTES,
    }


def _sm90_latent(smem: Mapping[str, float], l2_bytes: float, hbm_bytes: float, d_qk: int = D_QK, **more: object) -> Block:
    """Return a block of 16-bit products on sm90: the score role's chain is S and the softmax, overlapped with P V of the previous block."""
    flops = _latent_flops(d_qk)
    scores = Stage("S", *(flops["S"] / _MMA_16[SM90.name],) * 2)
    return Block(
        TILE_KEYS, TILE_ROWS, 1, flops, {**smem, "P": _P_BYTES}, l2_bytes, hbm_bytes,
        path=(scores, _SOFTMAX_SM90), fill=(scores, _SOFTMAX_SM90), **more,  # type: ignore[arg-type]
    )  # fmt: skip


def _sm100_latent(smem: Mapping[str, float], l2_bytes: float, hbm_bytes: float, d_qk: int = D_QK, **more: object) -> Block:
    """Return a block of 16-bit products on one SM of a pair of sm100. There is one S buffer, which the softmax must read first."""
    flops = _latent_flops(d_qk)
    scores = Stage("S", *(flops["S"] / _MMA_16[SM100.name],) * 2)
    chain = (_SOFTMAX_SM100, _HANDED_SM100)
    return Block(
        TILE_KEYS, TILE_ROWS, 1, flops, {**smem, **_sm100_operands(d_qk)}, l2_bytes, hbm_bytes,
        path=chain, fill=(scores, *chain), **more,  # type: ignore[arg-type]
    )  # fmt: skip


# ---------------------------------------------------------------- dense decode


def _dense_sm90(config: Config) -> Block:
    cluster = int(config["cluster"])
    if config["operands"] == FP8:
        return _dense_sm90_fp8(cluster)
    if config["operands"] == FP8_CACHE:
        read = TILE_KEYS * D_QK * E4M3_BYTES
        rows = {"copies and their reads": 2 * read, "converted rows": TILE_KEYS * _LATENT_ROW}
        return _sm90_latent({**_sm90_operands(D_QK, 4), **rows}, read, read)
    d_qk = int(config["d_qk"])
    keys = TILE_KEYS * d_qk * ELEMENT_BYTES
    return _sm90_latent({**_sm90_operands(d_qk, 5 if d_qk >= D_LATENT else 4), "TMA": keys}, keys / cluster, keys, d_qk, lone=("load",))


def _dense_sm90_fp8(cluster: int) -> Block:
    """Return a block of QGMMA products: at twice the rate, FLOP count half. V is transposed through registers; 8 rows of ones sum P."""
    keys = TILE_KEYS * D_QK * E4M3_BYTES
    flops = {"S": _product(64, 64, D_QK) / 2, "P V": _product(64, D_V, 64) / 2, "sum of P": 4 * _product(64, 8, 32) / 2}
    scores = Stage("S", *(flops["S"] / _MMA_16[SM90.name],) * 2)
    smem = {
        "S: K": 18 * 2048,
        "P V: P": 8 * 2048,
        "P V: V and ones": 4 * 4096 + 4 * 4352,
        "TMA, a box of 64 columns of zeros included": TILE_KEYS * (D_LATENT + 2 * D_ROPE),
        "transposition": 2 * TILE_KEYS * D_LATENT,
        "P": TILE_ROWS * TILE_KEYS * E4M3_BYTES,
    }
    path = (scores, _SOFTMAX_SM90_FP8)
    return Block(
        TILE_KEYS, TILE_ROWS, 1, flops, smem, keys / cluster, keys, path, (*path, Stage("transposition", 400, 533)), lone=("load",)
    )


def _dense_sm100(config: Config) -> Block:
    if config["operands"] == FP8:
        return _dense_sm100_fp8()
    if config["operands"] == FP8_CACHE:
        read = TILE_KEYS * D_QK * E4M3_BYTES / 2
        return _sm100_latent({"converted rows": TILE_KEYS * _LATENT_ROW / 2}, read, 2 * read)
    d_qk = int(config["d_qk"])
    keys, rotary = TILE_KEYS * d_qk * ELEMENT_BYTES / 2, LATENT_DIMS[d_qk].rotary
    boxes = {"TMA, a RoPE box of which half is used": keys + TILE_KEYS * rotary // 2 * ELEMENT_BYTES}
    block = _sm100_latent(boxes, sum(boxes.values()), 2 * keys, d_qk)
    if d_qk >= D_LATENT:
        return block
    best, worst = (sum(getattr(stage, end) for stage in block.path) / 2 for end in ("best", "worst"))
    return replace(block, path=(Stage("half of it: two groups take turns", best, worst, barriers=0),))


def _dense_sm100_fp8() -> Block:
    """Return a block whose chain may take two block times, because two groups of score warps alternate."""
    keys = TILE_KEYS * D_QK * E4M3_BYTES
    flops = {"S": _product(64, 64, D_QK) / 2, "P V": _product(64, D_V, 64) / 2, "sum of P": 2 * 8 * _MMA_16[SM100.name]}
    smem = {
        "S: K": 9 * 2048,
        "P V: V": 4 * 4096,
        "P V: P": 2 * 2048,
        "sums": 2 * 512,
        "TMA": TILE_KEYS * (D_LATENT // 2 + 2 * D_ROPE),
        "P": TILE_ROWS * TILE_KEYS * E4M3_BYTES,
        "S swapped": 2 * TILE_ROWS * TILE_KEYS * FLOAT_BYTES,
    }
    scores = Stage("S", *(flops["S"] / _MMA_16[SM100.name],) * 2)
    chain = Stage("softmax, swaps and what is handed over", 1150, 1150, barriers=0)
    half = Stage("half of it: two groups take turns", 575, 575, barriers=0)
    return Block(TILE_KEYS, TILE_ROWS, 1, flops, smem, keys / 2, keys, (half,), (scores, chain))


# ---------------------------------------------------------------- sparse decode and prefill


_SECTIONS = D_LATENT // 128  # of a gathered tile on sm90: stages of 128 columns
_EXCHANGED_DECODE = 3  # of them, between the CTAs of a pair, where columns are converted; 16-bit ones are exchanged whole
_EXCHANGED_PREFILL = 2


def _sectors(row_bytes: int) -> int:
    return -(-row_bytes // SECTOR) * SECTOR


def _own_share(ctas: int, exchanged: int) -> float:
    """Return the share of a tile's values that one of `ctas` CTAs brings: of exchanged stages its part, of the others all."""
    return 1 - exchanged / _SECTIONS * (1 - 1 / ctas)


def _pair_copies(ctas: int, exchanged: int) -> dict[str, float]:
    """Return the bytes that a CTA of a pair reads for the peer and receives from it: half of every exchanged stage each."""
    return {"copies to and from the peer": exchanged / _SECTIONS * TILE_KEYS * D_LATENT * ELEMENT_BYTES} if ctas > 1 else {}


def _gathered(layout: CacheFormat, ctas: int, exchanged: int) -> float:
    """Return the bytes of a block's rows that one of `ctas` CTAs gathers, in whole sectors.

    Of the keys that the peer brings, a CTA gathers what is not exchanged: columns that are no values, the last stages, and with
    converted columns the scales.
    """
    row = _sectors(layout.page_bytes(1))
    first = exchanged * D_LATENT // _SECTIONS  # column that is not exchanged
    wide = (layout.d_qk - max(first, layout.quantised)) * ELEMENT_BYTES
    codes = layout.code_bytes * max(layout.quantised - first, 0) // (layout.quantised or 1)
    own = _sectors(codes + wide + layout.scale_bytes)
    return TILE_KEYS * ((row - own) / ctas + own)


def _sparse_decode_sm90(config: Config) -> Block:
    cluster, layout = int(config["cluster"]), FORMATS[str(config["cache"])]
    exchanged = _EXCHANGED_DECODE if layout.group else _SECTIONS
    values, rope = TILE_KEYS * D_LATENT * ELEMENT_BYTES, TILE_KEYS * (layout.d_qk - D_LATENT) * ELEMENT_BYTES
    smem = {
        **_sm90_operands(layout.d_qk, 2 if layout.d_qk > D_LATENT else 1),
        "stores": values * _own_share(cluster, exchanged),
        "copies": float(rope),
        **_pair_copies(cluster, exchanged),
    }
    hbm = TILE_KEYS * layout.page_bytes(1)
    return _sm90_latent(smem, _gathered(layout, cluster, exchanged), hbm, layout.d_qk, loads=4)


def _sparse_decode_sm100(config: Config) -> Block:
    layout = FORMATS[str(config["cache"])]
    stored = TILE_KEYS * layout.d_qk * ELEMENT_BYTES / 2
    hbm = TILE_KEYS * layout.page_bytes(1)
    return _sm100_latent({"stores": stored}, hbm / 2, hbm, layout.d_qk, loads=4)


def _sparse_prefill_sm90(config: Config) -> Block:
    """Return a block without memory bytes: neighbouring tokens select the same rows, whose single read is in the launch's bytes."""
    cluster, d_qk = int(config["cluster"]), int(config["d_qk"])
    values, rope = TILE_KEYS * D_LATENT * ELEMENT_BYTES, TILE_KEYS * (d_qk - D_LATENT) * ELEMENT_BYTES
    copied = values * _own_share(cluster, _EXCHANGED_PREFILL) + rope
    smem = {**_sm90_operands(d_qk, 5), "copies": copied, **_pair_copies(cluster, _EXCHANGED_PREFILL)}
    seam = (Stage("rows of a token, then S and softmax of the next one", 1600, 2100),)
    return _sm90_latent(smem, copied, 0.0, d_qk, loads=3, seam=seam)


def _sparse_prefill_sm100(config: Config) -> Block:
    d_qk = int(config["d_qk"])
    if config["cluster"] == 1:
        return _sparse_prefill_heads64(d_qk)
    copied = TILE_KEYS * d_qk * ELEMENT_BYTES / 2
    return _sm100_latent({"copies": copied}, copied, 0.0, d_qk, loads=3, seam=(Stage("bubble between tokens", 1000, 1700),))


def _sparse_prefill_heads64(d_qk: int) -> Block:
    """Return a block of a CTA that works alone: S of 64 rows takes the time of 128, P V as D of 64 rows in all lanes does not."""
    flops = _latent_flops(d_qk)
    flops = {"S, at half of the rate": 2 * flops["S"], "P V": flops["P V"]}
    copied = float(TILE_KEYS * d_qk * ELEMENT_BYTES)
    values = TILE_KEYS * D_LATENT * ELEMENT_BYTES
    smem = {"S: K": copied, "P V: V": values, "P V: P": 2 * _PV_STEPS * 2048, "P": _P_BYTES, "copies": copied}
    chain = (_SOFTMAX_HEADS64, _HANDED_SM100)
    scores = Stage("S", *(flops["S, at half of the rate"] / _MMA_16[SM100.name],) * 2)
    seam = (Stage("bubble between tokens", 1000, 2000),)
    return Block(TILE_KEYS, TILE_ROWS, 1, flops, smem, copied, 0.0, path=chain, fill=(scores, *chain), seam=seam)


# ---------------------------------------------------------------- dense prefill


def prefill_variant(config: Config) -> DensePrefillConfig:
    """Return the variant of dense prefill that a configuration of the manifest names."""
    usual = {"d_qk": 192, "cluster": 1}
    return DensePrefillConfig("bf16", *(int(config.get(name, number)) for name, number in usual.items()))


def _dense_prefill(arch: str, config: Config) -> Block:
    variant = prefill_variant(config)
    d_qk, d_v, keys, rows = variant.d_qk, variant.d_v, variant.tile_keys(ARCHS[arch]), dense_prefill.TILE_ROWS[arch] // variant.cluster
    tiles = rows // 128
    read = keys * (d_qk + d_v) * ELEMENT_BYTES // variant.cluster
    flops = {"S": _product(rows, keys, d_qk), "P V": _product(rows, d_v, keys)}
    turn = flops["S"] / 2 / _MMA_16[arch]  # one of two groups of rows
    values = keys // 16 * d_v * 16 * ELEMENT_BYTES  # of a product with every key of a tile
    seam: tuple[Stage, ...]
    if arch == SM90.name:
        smem = {"S: Q and K": 2 * d_qk // 16 * (64 + keys) * 16 * ELEMENT_BYTES, "P V: V": 2 * values, "TMA": read}
        softmax = 950 if keys == 128 else 700
        path: tuple[Stage, ...] = (Stage("S of one warpgroup", turn, turn), Stage("its softmax and rescale", softmax, softmax))
        seam = (Stage("the next item looked up, O written", 0, 1000),)
    elif variant.cluster > 1:
        smem = {"S: Q and K": d_qk // 16 * 6144, "P V: V": values // 2, "TMA": read}
        path = (Stage("a softmax", 1330, 1900),)
        seam = (Stage("Q of the next item, O read out", 0, 1500),)
    else:
        smem = {"S: Q and K": 2 * d_qk // 16 * 8192, "P V: V": 2 * values, "TMA": read}
        product = flops["P V"] / 2 / _MMA_16[arch]
        path = (Stage("S of one Q tile", turn, turn), Stage("its softmax", 1070, 1070), Stage("its P V", product, product))
        seam = (Stage("ends of an item", 0, 0.1 * tiles * sum(flops.values()) / 2 / _MMA_16[arch]),)
    units = rows // TILE_ROWS * keys / TILE_KEYS
    return Block(keys, rows, units, flops, smem, read, 0.0, path, path, seam, loads=2)


def _masked_prefill(arch: str, config: Config) -> Block:
    """Return a block of dense prefill whose mask is read twice from L2, and whose softmax is behind selects (masked_prefill/README.md)."""
    block = _dense_prefill(arch, config)
    words = 2 * block.rows * block.keys // MASK_WORD_KEYS * _WORD_BYTES
    path = tuple(
        replace(stage, best=stage.best + _MASK_CLOCKS[arch], worst=stage.worst + _MASK_CLOCKS[arch]) if "softmax" in stage.name else stage
        for stage in block.path
    )
    return replace(block, l2_bytes=block.l2_bytes + words, path=path, fill=path)


def _dense_prefill_dq_sm90(config: Config) -> Block:
    """Return a block of dQ: the warpgroups issue in turn, S and dP of both, then dQ of both."""
    d_qk = int(config["d_qk"])
    rows, keys = dense_prefill_dq.TILE_ROWS, dense_prefill_dq.TILE_KEYS[SM90.name][d_qk]
    return _backward_sm90(_dq_tile(d_qk, rows, keys, issuers=2))


def _dense_prefill_dkdv_sm90(config: Config) -> Block:
    """Return a block of dK and dV: the warpgroups are half a block apart."""
    d_qk = int(config["d_qk"])
    keys, rows = (sizes[SM90.name][d_qk] for sizes in (dense_prefill_dkdv.TILE_KEYS, dense_prefill_dkdv.TILE_QUERIES))
    groups = keys // TILE_KEYS
    statistics = {"lse and delta, by eight warps": 8 * groups * rows * FLOAT_BYTES}
    if groups > 1:
        return _backward_sm90(_dkdv_tile(d_qk, rows, keys, groups, statistics))
    tile = _dkdv_tile(d_qk, rows, keys, groups, {**statistics, "P: written and read": 2 * rows * keys * ELEMENT_BYTES})
    exponentials = rows * keys / 16
    path = (
        *(Stage(name, *(tile.flops[name] / _MMA_16[SM90.name],) * 2) for name in ("S", "dK")),
        Stage("P, on its way to the other warpgroup, and dS", exponentials, 950),
    )
    return tile.block(path)


@dataclass(frozen=True)
class _BackwardTile:
    """Products, bytes of shared memory, and bytes read from L2 of a tile of the backward pass, `rows` queries by `keys`."""

    rows: int
    keys: int
    flops: Mapping[str, float]
    smem: Mapping[str, float]
    read: float

    def block(self, path: tuple[Stage, ...]) -> Block:
        """Return the tile as a block whose parts wait for each other in the order of `path`."""
        units = self.rows * self.keys // (TILE_ROWS * TILE_KEYS)
        return Block(self.keys, self.rows, units, self.flops, self.smem, self.read, 0.0, path, path, loads=2)


def _dq_tile(d_qk: int, rows: int, keys: int, issuers: int) -> _BackwardTile:
    """Return a tile of dQ whose rows are divided among so many issuers of products, which read the keys once each."""
    d_v, step = VALUE_COLUMNS_OF[d_qk], (rows + issuers * keys) * 16 * ELEMENT_BYTES  # step: both operands of a product over 16 columns
    read = keys * (d_qk + d_v) * ELEMENT_BYTES
    smem = {
        "S: Q and K": d_qk // 16 * step,
        "dP: dO and V": d_v // 16 * step,
        "dQ: K": issuers * keys * d_qk * ELEMENT_BYTES,
        "TMA": read,
    }
    flops = {"S": _product(rows, keys, d_qk), "dP": _product(rows, keys, d_v), "dQ": _product(rows, d_qk, keys)}
    return _BackwardTile(rows, keys, flops, smem, read)


def _dkdv_tile(d_qk: int, rows: int, keys: int, issuers: int, statistics: Mapping[str, int], sums: int = 1) -> _BackwardTile:
    """Return a tile of dK and dV whose keys are divided among so many issuers of products, which read the rows once each.

    statistics: bytes of lse and delta that warps read, by cause. sums: 2 where dK and dV are computed apart, S twice.
    """
    d_v, step = VALUE_COLUMNS_OF[d_qk], (keys + issuers * rows) * 16 * ELEMENT_BYTES
    read = sums * rows * (d_qk + d_v) * ELEMENT_BYTES
    smem = {
        "S: K and Q": sums * d_qk // 16 * step,
        "dP: V and dO": d_v // 16 * step,
        "dV: dO, dK: Q": issuers * read // sums,
        "TMA": read,
        **statistics,
    }
    flops = {
        "S": sums * _product(keys, rows, d_qk),
        "dP": _product(keys, rows, d_v),
        "dV": _product(keys, d_v, rows),
        "dK": _product(keys, d_qk, rows),
    }
    return _BackwardTile(rows, keys, flops, smem, read)


def _backward_sm90(tile: _BackwardTile) -> Block:
    """Return a block of either kernel: each of two warpgroups has a chain of its products, with exponentials and dS in between.

    Exponentials take the special function unit 2 clocks a row of 32; at worst, as long as the softmax of the forward pass.
    """
    exponentials = tile.keys * tile.rows / 2 / 16
    chain = (*(Stage(f"{name} of one warpgroup", *(each / 2 / _MMA_16[SM90.name],) * 2) for name, each in tile.flops.items()),)
    return tile.block((*chain, Stage("its exponentials and dS", exponentials, 950)))


def _dense_prefill_dq_sm100(config: Config) -> Block:
    """Return a block of dQ. dS is in tensor memory: dQ of a tile waits for it, and dP of the next tile, in order, for dQ."""
    d_qk = int(config["d_qk"])
    rows, keys = dense_prefill_dq.TILE_ROWS, dense_prefill_dq.TILE_KEYS[SM100.name][d_qk]
    tile = _dq_tile(d_qk, rows, keys, issuers=1)
    of_slopes, of_rows = (tile.flops[name] / _MMA_16[SM100.name] for name in ("dP", "dQ"))
    path = (Stage("dP", of_slopes, of_slopes), Stage("dS", 550 * keys / 128, 590), Stage("dQ", of_rows, of_rows, barriers=0))
    return tile.block(path)


def _dense_prefill_dkdv_sm100(config: Config) -> Block:
    """Return a block of dK and dV. P takes the place of S: S of the next tile, in order, waits for dV of the last part of P."""
    d_qk = int(config["d_qk"])
    keys, rows, sums = (
        sizes[SM100.name][d_qk] for sizes in (dense_prefill_dkdv.TILE_KEYS, dense_prefill_dkdv.TILE_QUERIES, dense_prefill_dkdv.ITEM_SUMS)
    )
    statistics = {"lse and delta, of eight rows in two turns, by four warps": 4 * 2 * rows // 8 * 256 * sums}
    tile = _dkdv_tile(d_qk, rows, keys, 1, statistics, sums)
    scores, values = (tile.flops[name] / _MMA_16[SM100.name] for name in ("S", "dV"))
    first = 32 if sums > 1 else 64  # rows that are handed over before the rest
    rest = values * (rows - first) / rows
    path = (Stage("S", scores, scores), Stage("P", 768, 1150), Stage("dV of the last part of P", rest, rest, barriers=0))
    return tile.block(path)


# ---------------------------------------------------------------- logits of the indexer


def _logits_block(config: Config, smem: Mapping[str, float], path: tuple[Stage, ...]) -> Block:
    """Return a tile of keys against two row blocks, whose keys other row blocks bring to L2; with pages, against one, from memory."""
    keys, blocks = mqa_logits.TILE_KEYS, logits_row_blocks(config)
    rows, read = blocks * mqa_logits.BLOCK_COLUMNS, float(keys * mqa_logits.ROW_BYTES)
    flops = {"scores": _product(keys, rows, mqa_logits.COLUMNS) / 2}
    units = keys // TILE_KEYS * (1 if config["paged"] else rows // TILE_ROWS)  # instructions are counted with a token of 64 rows or less
    smem = {"TMA": keys * mqa_logits.COLUMNS, **smem}
    return Block(keys, rows, units, flops, smem, read, read if config["paged"] else 0.0, path, path, lone=("load", "item", "mma", "fill"))


def logits_row_blocks(config: Config) -> int:
    """Return the row blocks of an item of the rows that are modelled."""
    return 1 if config["paged"] else mqa_logits.ITEM_BLOCKS


def _logits_sm90(config: Config) -> Block:
    """Return a tile of which each row block takes two warpgroups. Another warpgroup has its product while one sums."""
    blocks = logits_row_blocks(config)
    operands = blocks * 8 * (64 + mqa_logits.BLOCK_COLUMNS) * 32
    weights = blocks * 256 * mqa_logits.BLOCK_COLUMNS / 8 * FLOAT_BYTES / 2
    product = _product(64, mqa_logits.BLOCK_COLUMNS, mqa_logits.COLUMNS) / 2 / _MMA_16[SM90.name]
    path = (Stage("product of a warpgroup", product, product), Stage("its sums", 480, 620))
    return _logits_block(config, {"operands": operands, "weights and scales": weights}, path)


def _logits_sm100(config: Config) -> Block:
    """Return a tile whose row blocks have a group of warps each; the groups take turns at tiles of one row block."""
    blocks = logits_row_blocks(config)
    operands = blocks * (mqa_logits.TILE_KEYS + mqa_logits.BLOCK_COLUMNS) * mqa_logits.COLUMNS
    path = (Stage("sums of a group", 560 * blocks / 2, 760 * blocks / 2, barriers=0),)
    return _logits_block(config, {"operands": operands}, path)


_BLOCKS: Mapping[tuple[str, str], Callable[[Config], Block]] = {
    ("dense_decode", SM90.name): _dense_sm90,
    ("dense_decode", SM100.name): _dense_sm100,
    ("sparse_decode", SM90.name): _sparse_decode_sm90,
    ("sparse_decode", SM100.name): _sparse_decode_sm100,
    ("sparse_prefill", SM90.name): _sparse_prefill_sm90,
    ("sparse_prefill", SM100.name): _sparse_prefill_sm100,
    ("dense_prefill", SM90.name): lambda config: _dense_prefill(SM90.name, config),
    ("dense_prefill", SM100.name): lambda config: _dense_prefill(SM100.name, config),
    ("masked_prefill", SM90.name): lambda config: _masked_prefill(SM90.name, config),
    ("masked_prefill", SM100.name): lambda config: _masked_prefill(SM100.name, config),
    ("dense_prefill_dq", SM90.name): _dense_prefill_dq_sm90,
    ("dense_prefill_dq", SM100.name): _dense_prefill_dq_sm100,
    ("dense_prefill_dkdv", SM90.name): _dense_prefill_dkdv_sm90,
    ("dense_prefill_dkdv", SM100.name): _dense_prefill_dkdv_sm100,
    ("mqa_logits", SM90.name): _logits_sm90,
    ("mqa_logits", SM100.name): _logits_sm100,
}


def block_of(op: str, arch: str, config: Config) -> Block:
    """Return the block of the kernel with this configuration. ValueError for an op without a loop over keys."""
    make = _BLOCKS.get((op, arch))
    if make is None:
        raise ValueError(f"op is {op!r}; blocks of keys have {', '.join(dict.fromkeys(name for name, _ in _BLOCKS))}")
    return make(config)
