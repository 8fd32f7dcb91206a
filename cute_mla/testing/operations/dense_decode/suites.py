"""Suites of dense decode."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain, product

from ....spec.dense_decode import FEW_HEADS, FP8, FP8_CACHE, LATENT, OPERANDS, TILE_ROWS, takes_key_masks
from ....spec.mla import BF16, D_QK, D_V, DENSE_DIMS, key_dtypes
from ....spec.split_plan import INVARIANT_SPLIT_TILES, TILE_KEYS
from ...cases.base import DTYPES, Outputs, QLayout
from ...cases.far import FAR_DIMENSIONS
from ...cases.tensors import CLIFF_SCALE, ORDERED, STEP
from ...suites.cover import SPREAD_SCALE, STEPS_SCALE, Choice, Factors, Variant, cover, ramps
from ...suites.entries import OpSuites, SimulatorReduction
from .case import DESCALE_K, STEP_CODE, DenseDecodeCase

GRID_BATCH = (1, 2, 6, 64)
GRID_S_Q = (1, 2, 4)
GRID_S_K = (20, 140, 4096)
GRID_H_Q = (1, 3, 9, 63, 64, 126, 128)
GRID_H_KV = (1, 2, 3, 8)
GRID_TYPES = (*((dtype, LATENT) for dtype in DTYPES), (BF16, FP8_CACHE), (BF16, FP8))
OTHER_COLUMNS = tuple(d_qk for d_qk in DENSE_DIMS if d_qk != D_QK)  # of keys, with LATENT only

_TWO_SPLITS = INVARIANT_SPLIT_TILES * TILE_KEYS + TILE_KEYS  # keys of a request that a batch-invariant call splits in two
_MOST_SEEN = _TWO_SPLITS + 2 * TILE_KEYS + 17  # of one that also has room for cuts of a plan behind the split


def with_fp8(case: DenseDecodeCase, operands: str) -> DenseDecodeCase:
    """Return the case with these operands, with out in bf16 where any of them is e4m3."""
    return replace(case, operands=operands, dtype=case.dtype if operands == LATENT else BF16)


_MINUS_INF = float("-inf")

_SPLIT_PAIRS = 4

# Features of a small case, by factor. lengths: keys of each request and columns of the block table in units of 64 keys, None: any number;
# pairs of SMs for each KV head.
_SEVERAL_TILES = ((200, 0, 130), None, 1)  # beside a request without keys
_CUT = ((260, 2), None, _SPLIT_PAIRS)  # into splits
_STALE = ((260, 20), None, _SPLIT_PAIRS)  # by a plan that takes the second request for the long one
_LENGTHS = (
    ((0, 1, 63, 64, 65), None, 2),  # around a tile; some rows see no key under a causal mask
    _SEVERAL_TILES,
    ((1000, 70, -5), 3, 1),  # beyond the block table, and negative
    _CUT,
    _STALE,
)
# Tree mask, window, and first keys that are always seen.
_ALL_SEEN = ("none", None, 0)
_TREES = (("strided", None, 0), ("far_requests", None, 0), ("far_tokens", None, 0))
# One key; first keys that end in the second half of a tile, and with a tile
_WINDOWS = (("none", 1, 0), ("none", 50, 40), ("none", 70, 64))
_FACTORS: Factors = {
    "lengths": _LENGTHS,
    "page_size": (16, 32, 64, 128),
    "values": ramps(),
    "cache_layout": ("packed", "layers", "padded_rows", "heads_first", "far", "far_rows"),
    "q_layout": ("packed", "sliced", "heads_first", "far_requests", "far_tokens", "far_heads"),
    "outputs": ("allocated", "given", "strided", "far_requests", "far_tokens", "far_heads"),
    "causal": (False, True),
    "s_q": (2, 3),
    "far_table": (False, True),
    "broken": (False, True),  # used entries of the block table that name no page
    "metadata": ("object", "tensors"),
    "batch_invariant": (False, True),
    "empty_lse": (None, _MINUS_INF),
    "scaled": (True,),  # whether e4m3 operands have scales
    "sinks": ("none", "drawn", "infinite"),
    "seen": (_ALL_SEEN, *_TREES, *_WINDOWS),
}
_STEPS_SCALE_OF_E4M3 = STEPS_SCALE * STEP / (STEP_CODE * DESCALE_K)
_KINDS = (
    *((dtype, operands, D_QK) for dtype, operands in GRID_TYPES),
    *((dtype, LATENT, d_qk) for d_qk in OTHER_COLUMNS for dtype in key_dtypes(d_qk)),
)
# Query heads and KV heads, by whether two CTAs or one take a KV head's rows; other operands than LATENT have one KV head.
# Two or three tokens are 42 rows or more of a tile, so that needles are at all of its keys. Few, some: kernels with keys on M.
_KEYS_ON_M = {"few": FEW_HEADS, "some": 2 * FEW_HEADS}  # most rows
_HEADS_OF_ROWS = {"few": ((3, 1), (5, 1)), "some": ((9, 1), (10, 1)), "one": ((21, 1), (63, 3)), "two": ((42, 1), (126, 3))}


def _small(choice: Choice) -> DenseDecodeCase | None:
    """Return the small case with these features; None if the values are not possible together."""
    rest = {name: value for name, value in choice.items() if name not in ("lengths", "values", "seen", "heads")}
    rest["tree"], rest["window"], rest["window_sink"] = choice["seen"]
    (lengths, blocks, sms), (h_q, h_kv), (values, scale) = choice["lengths"], choice["heads"], choice["values"]
    if rest["window"] is not None and choice["broken"]:
        return None  # a window hides broken pages
    if values in ORDERED and max(lengths) < 3 * TILE_KEYS:
        return None
    if choice["batch_invariant"] and sms > 2:
        return None  # nothing would be cut: see _staircase
    if h_kv > 1 and (choice["lengths"][1:] != _CUT[1:] and choice["lengths"] != _SEVERAL_TILES):
        return None  # three KV heads cost most
    if not choice["scaled"] and values == "steps":
        return None
    if choice["lengths"] == _STALE:
        rest["metadata"] = "stale"
        if choice["outputs"] in FAR_DIMENSIONS:
            return None  # no request is whole
    table = None if blocks is None else max(blocks * TILE_KEYS // choice["page_size"], 1)
    return DenseDecodeCase(
        batch=len(lengths), lengths=lengths, h_q=h_q, h_kv=h_kv, table_pages=table, values=values, softmax_scale=scale,
        sm_count=2 * sms * h_kv, **rest,
    )  # fmt: skip


def _kinds() -> Iterator[tuple[tuple[str, str, int], str]]:
    """Yield every kind of operands with rows in one CTA and in two, and with few rows or some if they have kernels of their own."""
    on_m: dict[str, tuple[tuple[str, str, int], ...]] = {
        "few": tuple((BF16, operands, D_QK) for operands in OPERANDS),
        "some": ((BF16, FP8, D_QK),),
    }
    return ((kind, rows) for kind, rows in product(_KINDS, _HEADS_OF_ROWS) if kind in on_m.get(rows, _KINDS))


def _variants() -> Iterator[Variant]:
    """Yield all kinds of operands and rows."""
    for (dtype, operands, d_qk), rows in _kinds():
        heads = tuple(pair for pair in _HEADS_OF_ROWS[rows] if operands == LATENT or pair[1] == 1)
        factors: Factors = {**_FACTORS, "heads": heads}
        if operands != LATENT:
            factors = {**factors, "values": ramps(_STEPS_SCALE_OF_E4M3), "scaled": (True, False)}
        if not takes_key_masks(operands):
            factors = {**factors, "seen": (_ALL_SEEN,)}
        if rows in _KEYS_ON_M:  # which batch-invariant calls do not take
            factors = {**factors, "batch_invariant": (False,), "seen": (_ALL_SEEN,)}
        if rows == "two":
            layouts = {
                "cache_layout": ("packed", "far", "far_rows"),
                "q_layout": ("packed", *FAR_DIMENSIONS),
                "outputs": ("strided", *FAR_DIMENSIONS),
            }
            factors = {**factors, **layouts, "lengths": _LENGTHS[1:], "s_q": (2,)}
        columns = "" if d_qk == D_QK else f" {d_qk}"
        yield Variant(f"{dtype} {operands}{columns} {rows}", {"dtype": dtype, "operands": operands, "d_qk": d_qk}, factors)


VARIANTS = tuple(_variants())


def _covers() -> Iterator[DenseDecodeCase]:
    """Yield small cases with every feature of every variant."""
    seen: set[object] = set()
    for variant, ((dtype, operands, d_qk), rows) in zip(VARIANTS, _kinds(), strict=True):
        yield from cover(variant, _small, seen)
        yield replace(_ragged(dtype, operands, rows), d_qk=d_qk)
        if rows != "two" or operands != FP8_CACHE:  # two CTAs never share the conversion of a tile on Hopper
            yield replace(_staircase(dtype, operands, rows), d_qk=d_qk)
            yield replace(_overwritten_plan(dtype, operands, rows), d_qk=d_qk)
        if rows == "one":
            yield replace(_row_tiles(dtype, operands), d_qk=d_qk)
        if (operands, rows) == (FP8, "one"):  # other calls take a kernel for few rows on Blackwell
            yield replace(_ragged(dtype, operands, rows), batch_invariant=True)
        if takes_key_masks(operands) and rows not in _KEYS_ON_M:
            yield replace(_long_window(dtype, operands, rows), d_qk=d_qk)
            yield replace(_tree_staircase(dtype, operands, rows), d_qk=d_qk)
            yield replace(_ragged_tree(dtype, operands, rows), d_qk=d_qk)
            yield replace(_ragged(dtype, operands, rows), d_qk=d_qk, window=70, window_sink=3, page_size=16, metadata="tensors")
        if takes_key_masks(operands) and rows == "few":  # on RTX boards calls with up to 16 rows, or heads if batch invariant
            yield _tree_staircase(dtype, operands, rows)
            yield replace(_ragged_tree(dtype, operands, "one"), batch_invariant=True)
            yield replace(_ragged(dtype, operands, rows), window=70, window_sink=3, page_size=16, metadata="tensors")


def _staircase(dtype: str, operands: str, rows: str) -> DenseDecodeCase:
    """Return a causal case of one head, whose rows see every number of the keys of a tile; batch invariant, with a plan that cuts.

    The last key that a row sees outweighs all others, as the next one would.

    The third request shifts the numbers by half of the 16 rows that a warp of Hopper's tensor cores has. The first has a tile more than a
    warp looks up pages for at once. The plan is of other lengths, that of one request of more than 256 tiles: parts end and begin inside
    its first tiles, where the call must not cut, and behind the first multiple at which it may, where nothing of the request is left. The
    table has room for two splits of a request. Most variants have packed query tokens, and a long request before that has none.
    """
    tokens = {**_KEYS_ON_M, "one": TILE_ROWS, "two": 2 * TILE_ROWS}[rows]
    lengths: tuple[int, ...] = (570, tokens + 36, tokens + 108)
    if rows in _KEYS_ON_M:  # so that rows of all requests together see every number of keys
        lengths = (570, 72, 88, 104, 170) if rows == "few" else (570, 96, 128, 170)
    case = DenseDecodeCase(
        dtype, batch=len(lengths), s_q=tokens, h_q=1, lengths=lengths, causal=True, batch_invariant=True, metadata="longer"
    )
    case = replace(case, values="cliff", softmax_scale=CLIFF_SCALE, sinks="drawn")
    case = with_fp8(replace(case, sm_count=4, page_size=16, table_pages=_TWO_SPLITS // 16, far_table=True), operands)
    if rows in _KEYS_ON_M:
        case = replace(case, batch_invariant=False, metadata="stale")
    if rows == "two" or operands == FP8_CACHE:
        counts = 0, tokens, tokens - 2, *(tokens,) * (len(lengths) - 2)
        return replace(case, batch=len(counts), tokens=counts, lengths=(_TWO_SPLITS, *lengths), sm_count=8)
    return case


def _tree_staircase(dtype: str, operands: str, rows: str) -> DenseDecodeCase:
    """Return the staircase with a tree mask of several words, whose tokens begin at any bit of a tile. The plan is a right one."""
    case = replace(_staircase(dtype, operands, rows), causal=False, tree="strided", page_size=64, table_pages=None)
    assert case.lengths is not None
    case = replace(case, batch=3, tokens=None, lengths=case.lengths[-3:])
    return replace(case, metadata="object", batch_invariant=False, sm_count=4)


def _long_window(dtype: str, operands: str, rows: str) -> DenseDecodeCase:
    """Return the staircase of 64 tokens with a window, so that what rows see begins at every key of a tile; all scores count.

    The first request has a skipped tile, whose last key all windows just miss. A tile of the second has one key that the last window misses
    and one of the third has one key that all miss. The tile behind a skipped one of the fourth has one key that the first window sees. The
    first keys end with the first key of a tile.
    """
    case = replace(_staircase(dtype, operands, rows), values="normal", softmax_scale=SPREAD_SCALE)
    window, reach = 150, 150 + TILE_ROWS - 1
    lengths = (reach + 3 * TILE_KEYS, window + 1 + 2 * TILE_KEYS, reach + 1 + 2 * TILE_KEYS, reach - 1 + 4 * TILE_KEYS)
    h_q = 1 if rows == "one" else 2
    case = replace(case, s_q=TILE_ROWS, h_q=h_q, batch=len(lengths), tokens=None, lengths=lengths)
    return replace(case, window=window, window_sink=TILE_KEYS + 1, page_size=32, table_pages=None)


def _ragged(dtype: str, operands: str, rows: str) -> DenseDecodeCase:
    """Return a causal case of requests with different numbers of query tokens, none too, in one work unit or in two.

    The plan cuts a unit that lacks tokens, of 300 keys; the first token of the last request sees no key. Of two requests in two units, one
    has a first row tile that sees a tile less than the second, by a key, and the other a first unit that sees a tile less. Then a part has
    several units; the plan is of other lengths, so that the cut is in the middle of a page.
    """
    whole = rows != "two"  # one CTA holds all rows of a request, or two take them
    tokens, h_q, sms = ((3, 0, 1, 2, 2), {"few": 5, "some": 9}.get(rows, 21), 12) if whole else ((5, 0, 1, 4, 2), 42, 6)
    layouts: tuple[QLayout, Outputs] = ("heads_first", "strided")
    if whole:  # without tokens behind those of the last request where the call allocates its results
        layouts = ("far_tokens", "far_tokens" if operands == LATENT else "allocated")
    elif dtype == "bf16":
        layouts = ("heads_first", "allocated")
    lengths = (66, 70, 300, 64, 1) if whole else (67, 900, 300, 65, 1)
    case = DenseDecodeCase(dtype, batch=5, tokens=tokens, lengths=lengths, h_q=h_q, page_size=128, causal=True, sm_count=sms)
    case = replace(case, sinks="drawn", q_layout=layouts[0], metadata="object" if whole else "stale")
    return replace(with_fp8(case, operands), outputs=layouts[1])


def _ragged_tree(dtype: str, operands: str, rows: str) -> DenseDecodeCase:
    """Return the case of _ragged with a tree mask of two words, of which most requests use the first bits.

    Where one CTA holds all rows, there are no tokens behind those of the last request.
    """
    case = replace(_ragged(dtype, operands, rows), q_layout="packed", outputs="given", tree="strided")
    if rows == "one":
        return replace(case, tokens=(12, 0, 17, 2, 2), lengths=(80, 70, 380, 65, 1), s_q=40, h_q=1, outputs="allocated")
    return replace(case, lengths=(67, 900, 272, 65, 1), s_q=33, metadata="tensors", sm_count=20)


def _overwritten_plan(dtype: str, operands: str, rows: str) -> DenseDecodeCase:
    """Return a case whose plan is no plan, nor is its table of units. Its results are undefined, but it keeps to its operands."""
    # The row behind the last is the first of a Hopper thread's two rows, or the second where two CTAs share keys.
    h_q, sms = {"few": (5, 6), "some": (10, 6), "one": (18, 6), "two": (42, 12)}[rows]
    case = DenseDecodeCase(dtype, batch=5, tokens=(1, 3, 2, 0, 2), lengths=(66, 20, 3, 5, 9), h_q=h_q, sm_count=sms)
    mask = replace(case, tree="drawn") if rows == "two" and takes_key_masks(operands) else replace(case, causal=True)
    return replace(with_fp8(mask, operands), outputs="given", metadata="overwritten")


def _row_tiles(dtype: str, operands: str) -> DenseDecodeCase:
    """Return a case of rows in three CTAs: with a causal mask, where the first two see a tile less than the third, by a key, or without."""
    case = DenseDecodeCase(dtype, batch=2, s_q=9, lengths=(65, 20), h_q=16, causal=operands != LATENT, outputs="given", sm_count=4)
    return with_fp8(case, operands)


def _split_units(dtype: str, operands: str, rows: str) -> DenseDecodeCase:
    """Return a case with a unit that a batch-invariant call splits, where parts of the plan begin and end at the second split."""
    case = DenseDecodeCase(dtype, batch=3, tokens=(0, 2, 3), lengths=(50, _MOST_SEEN, 100), h_q=16 if rows == "one" else 42, causal=True)
    case = replace(case, outputs="given", sinks="none" if operands == LATENT else "drawn")
    return replace(with_fp8(case, operands), batch_invariant=True, sm_count=144)


# Cases whose size is what they test.
_LARGE_16_BITS: tuple[DenseDecodeCase, ...] = (
    # One split a key tile: 64 or 65 splits, of which combine reads 32 at a time. By its grid, a warp of combine takes a whole row or a
    # quarter of its columns. Scores that rise overflow if the maximum of the first 32 splits counts.
    DenseDecodeCase("fp16", s_k=65 * TILE_KEYS, h_q=3, values="rising", softmax_scale=0.15, sm_count=160, outputs="given"),
    DenseDecodeCase(s_k=4096, h_q=3, values="peaks", softmax_scale=0.1, sm_count=160, outputs="strided"),
    DenseDecodeCase(
        batch=10,
        s_q=64,
        lengths=(65 * TILE_KEYS - 3, *(3,) * 9),
        h_q=1,
        values="rising",
        softmax_scale=0.15,
        sm_count=256,
        outputs="strided",
    ),
    DenseDecodeCase("fp16", batch=4, s_q=64, lengths=(40 * TILE_KEYS - 3, 3, 3, 3), h_q=1, sm_count=126, causal=True),
    # More requests than lanes in a warp, with a precomputed plan.
    DenseDecodeCase("fp16", batch=64, s_k=20, h_q=3, varlen=True, metadata="tensors", sm_count=8),
    # Many KV heads.
    DenseDecodeCase(batch=2, s_q=4, s_k=140, h_q=64, h_kv=8, causal=True, cache_layout="layers", metadata="tensors", sm_count=16),
    # Two full row tiles of a pair of CTAs, and one row.
    DenseDecodeCase(s_k=300, h_q=128, q_layout="sliced", values="peaks", softmax_scale=0.1, sm_count=4),
    DenseDecodeCase(batch=6, s_q=4, s_k=20, h_q=1, page_size=128, varlen=True, causal=True, zero_lengths=True, sm_count=4),
    DenseDecodeCase(s_q=5, s_k=140, h_q=26, h_kv=2, causal=True, sm_count=4),
    # Units of two row tiles, the first of which sees a tile less.
    DenseDecodeCase(batch=2, tokens=(130, 3), lengths=(300, 70), h_q=1, causal=True, outputs="strided", sm_count=4),
    # Over an e4m3 cache; the keys of later tokens alone fill a tile.
    DenseDecodeCase(batch=2, tokens=(20, 3), lengths=(130, 70), h_q=8, causal=True, operands=FP8_CACHE, sm_count=2),
    # A part of a batch-invariant call begins with the last key of a unit, alone in its tile behind the multiple at which the call may cut.
    *(
        DenseDecodeCase(
            batch=3,
            tokens=(2, 1, 2),
            lengths=(20, _TWO_SPLITS - TILE_KEYS + 1, 30),
            h_q=h_q,
            page_size=128,
            causal=True,
            batch_invariant=True,
            operands=operands,
            sm_count=sms,
        )
        for operands, h_q, sms in ((LATENT, 8, 144), (LATENT, 42, 288), (FP8_CACHE, 8, 288))
    ),
    # Of several KV heads, whose keys are not masked, under a plan of other lengths.
    DenseDecodeCase(
        batch=3, tokens=(1, 3, 2), s_q=8, lengths=(100, 400, 70), h_q=16, h_kv=2, outputs="given", metadata="stale", sm_count=12
    ),
    # Decode batches of serving engines: TP8, and one long request among short ones.
    DenseDecodeCase(batch=8, s_k=700, varlen=True, q_layout="sliced", cache_layout="layers", outputs="given", sm_count=12),
    DenseDecodeCase("fp16", batch=4, s_q=4, lengths=(464, 4511, 173, 169), page_size=32, causal=True, metadata="tensors"),
)
# A request that a batch-invariant call splits, beside one that it does not split, on a device with another number of SMs.
# Two of the plan's cuts lie behind the only multiple at which the call may cut.
_INVARIANT = DenseDecodeCase(batch=2, lengths=(100, _MOST_SEEN), page_size=128, batch_invariant=True, metadata="tensors", sm_count=144)
# The same with three skipped tiles, of the last of which the window just misses the last key. A part of the plan has both splits.
_INVARIANT_WINDOW = replace(_INVARIANT, lengths=(100, _MOST_SEEN + 3 * TILE_KEYS), window=_MOST_SEEN, sm_count=4)
# Cases of this kind with all operands.
_LARGE: tuple[DenseDecodeCase, ...] = (
    DenseDecodeCase(batch=0, h_q=64),
    # No query token at all.
    DenseDecodeCase(batch=2, tokens=(0, 0), s_q=4, outputs="given", sm_count=4),
    # Row tiles of which the first see fewer tiles of keys, or none, of requests that are cut; as CTAs alone and as pairs.
    DenseDecodeCase(batch=2, s_q=320, lengths=(430, 100), h_q=1, causal=True, sm_count=15),
    DenseDecodeCase("fp16", batch=2, s_q=256, lengths=(300, 70), h_q=1, causal=True, sm_count=12),
    # The running maximum moves in every tile of a long loop, or never after the first tile; a single CTA, or a pair, processes it.
    DenseDecodeCase(batch=2, s_k=1100, h_q=64, values="rising", sm_count=2),
    DenseDecodeCase("fp16", s_k=1050, h_q=9, values="falling", sm_count=1),
)


def _other_columns() -> Iterator[DenseDecodeCase]:
    """Yield cases with other columns of keys: loops with more tiles than a ring has stages, and requests that an invariant call splits.

    Of the latter, one has a CTA a tile and two have a pair: a part of the plan begins at the second split, or has both.
    """
    for d_qk, h_q in product(OTHER_COLUMNS, (TILE_ROWS, 2 * TILE_ROWS)):
        yield DenseDecodeCase(s_k=13 * TILE_KEYS - 9, h_q=h_q, d_qk=d_qk, values="rising", sm_count=2)
    for d_qk, h_q in zip(OTHER_COLUMNS, (2 * TILE_ROWS, TILE_ROWS, TILE_ROWS), strict=True):
        yield DenseDecodeCase(batch=2, lengths=(100, _MOST_SEEN), h_q=h_q, d_qk=d_qk, page_size=128, batch_invariant=True, sm_count=144)
    yield DenseDecodeCase(s_k=_TWO_SPLITS, h_q=2 * TILE_ROWS, d_qk=D_V, page_size=128, batch_invariant=True, sm_count=4)


def _four_byte_rows() -> Iterator[DenseDecodeCase]:
    """Yield cases of rows at multiples of 4 bytes, which Hopper takes: q of every variant, results that are cut, and results that are not.

    Of requests that are cut, combine writes whole rows, or parts of rows where there are few of them.
    """
    for (dtype, operands, d_qk), h_q in product(_KINDS, (21, 2 * TILE_ROWS)):
        case = DenseDecodeCase(dtype, batch=2, lengths=(260, 2), h_q=h_q, d_qk=d_qk, q_layout="even", outputs="even", sm_count=16)
        yield with_fp8(case if h_q == 21 else replace(case, lengths=(130, 70), sm_count=2), operands)
        if h_q == 21 and operands == FP8_CACHE:
            yield with_fp8(replace(case, h_q=7), operands)
    yield DenseDecodeCase(batch=10, s_q=64, lengths=(9 * TILE_KEYS, *(3,) * 9), h_q=1, outputs="even", sm_count=256)


SMOKE = tuple(
    dict.fromkeys(
        [
            *_LARGE_16_BITS,
            *_four_byte_rows(),
            *_other_columns(),
            _split_units("bf16", LATENT, "one"),
            *(_INVARIANT_WINDOW if takes_key_masks(operands) else with_fp8(_INVARIANT, operands) for operands in OPERANDS),
            *(with_fp8(case, operands) for operands in OPERANDS for case in _LARGE),
            *_covers(),
        ]
    )
)


def _every_split() -> Iterator[DenseDecodeCase]:
    """Yield a case of every variant with a unit that a batch-invariant call splits. Each takes a second or more."""
    for (dtype, operands, d_qk), rows in product(_KINDS, ("one", "two")):
        yield replace(_split_units(dtype, operands, rows), d_qk=d_qk)


def _heads() -> Iterator[tuple[int, int]]:
    return ((h_q, h_kv) for h_q, h_kv in product(GRID_H_Q, GRID_H_KV) if h_q % h_kv == 0)


def grid(dtype: str, operands: str = LATENT, d_qk: int = D_QK) -> list[DenseDecodeCase]:
    """Return FlashMLA's dense-decode grid; with an e4m3 cache, its cases with one KV head."""
    factors = product(GRID_BATCH, GRID_S_Q, GRID_S_K, _heads(), (False, True), (False, True))
    cases = [
        DenseDecodeCase(dtype, batch=batch, s_q=s_q, s_k=s_k, h_q=h_q, h_kv=h_kv, d_qk=d_qk, varlen=varlen, causal=causal)
        for batch, s_q, s_k, (h_q, h_kv), varlen, causal in factors
    ]
    return cases if operands == LATENT else [with_fp8(case, operands) for case in cases if case.h_kv == 1]


def zero_length_cases() -> list[DenseDecodeCase]:
    """Return FlashMLA's large case with about half of the requests empty, and small cases like it."""
    large = [
        DenseDecodeCase(d, batch=128, s_q=2, s_k=4096, h_q=128, varlen=True, causal=c, zero_lengths=True) for d, c in _types_and_masks()
    ]
    small = [
        DenseDecodeCase(d, batch=batch, s_q=2, s_k=140, h_q=h_q, varlen=True, causal=c, zero_lengths=True)
        for batch, h_q, (d, c) in product((1, 6), (9, 128), _types_and_masks())
    ]
    return small + large


def _types_and_masks() -> Iterator[tuple[str, bool]]:
    return product(DTYPES, (False, True))


def _more() -> Iterator[DenseDecodeCase]:
    """Yield what the full suite has besides the smoke cases."""
    yield from _every_split()
    yield from chain.from_iterable(grid(*types) for types in GRID_TYPES)
    yield from chain.from_iterable(grid(dtype, d_qk=d_qk) for d_qk in OTHER_COLUMNS for dtype in key_dtypes(d_qk))
    yield from zero_length_cases()


# The smoke cases, and a few cases of 4,096 keys: one and several row tiles, one and several KV heads, an odd number of heads.
_ALWAYS_WHOLE = frozenset(
    {
        *SMOKE,
        *_every_split(),
        DenseDecodeCase(s_k=4096, h_q=64),
        DenseDecodeCase(s_q=2, s_k=4096, h_q=128, causal=True),
        DenseDecodeCase("fp16", s_k=4096, h_q=128),
        DenseDecodeCase("fp16", s_q=4, s_k=4096, h_q=9, h_kv=3, causal=True),
        DenseDecodeCase(batch=2, s_q=4, s_k=4096, h_q=63, varlen=True, causal=True),
        DenseDecodeCase(s_k=4096, h_q=64, h_kv=8, varlen=True),
        *(DenseDecodeCase(s_k=4096, h_q=h_q, operands=operands) for h_q in (16, 128) for operands in (FP8_CACHE, FP8)),
        *(DenseDecodeCase(s_k=4096, h_q=h_q, d_qk=d_qk) for h_q in (16, 128) for d_qk in OTHER_COLUMNS),
    }
)


def _factors(case: DenseDecodeCase) -> tuple[str | int | bool | tuple[int, int], ...]:
    heads = (case.h_q, case.h_kv)
    return case.dtype, case.operands, case.d_qk, case.batch, case.s_q, case.s_k, heads, case.varlen, case.causal, case.zero_lengths


def _is_short(case: DenseDecodeCase) -> bool:
    return case.batch <= 6 and case.s_k <= 140


OP_SUITES = OpSuites(VARIANTS, SMOKE, _more, SimulatorReduction(_ALWAYS_WHOLE.__contains__, _factors, _is_short))
