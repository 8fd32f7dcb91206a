"""Decode over a prefix that all requests share, against the reference and one call over all keys."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from cute_mla import flash_mla_with_kvcache, get_mla_metadata, reference
from cute_mla.ops.limits import value_columns
from cute_mla.runtime.current import simulate
from cute_mla.shared_prefix import SharedPrefix, decode_shared_prefix, split_shared_prefix
from cute_mla.spec.arch import Arch
from cute_mla.spec.mla import ceil_div
from cute_mla.testing.compare import DENSE_DECODE_OUT, FP8_DENSE_OUT, LSE, compare, same_bits

PAGE_SIZE = 64
UNUSED = 2_147_480_000
DESCALE_Q, DESCALE_K = torch.tensor([0.0171]), torch.tensor([0.0137])
SCALE = 2.0  # of values of N(0, 1)/10, for which bounds of the ops hold: scores of deviation 0.5


@dataclass(frozen=True)
class PrefixCall:
    """A step: keys of the prefix, keys behind it of each request. -3: a request that is 3 keys shorter, with keys of its own."""

    own: tuple[int, ...]
    prefix: int = 128
    s_q: int = 1
    heads: int = 3
    causal: bool = False
    dtype: torch.dtype = torch.bfloat16
    d_qk: int = 576
    batch_invariant: bool = False
    seed: int = 0

    @property
    def is_fp8(self) -> bool:
        return self.dtype == torch.float8_e4m3fn

    def operands(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return q, the cache, NaN but for the keys, the block table with entries far outside behind them, and the lengths."""
        draw = torch.Generator().manual_seed(self.seed)
        shared = self.prefix // PAGE_SIZE
        lengths = [self.prefix + own for own in self.own]
        pages = [ceil_div(length, PAGE_SIZE) for length in lengths]
        order = torch.randperm(shared + sum(pages) + 2, generator=draw).int()
        cache = torch.full((len(order), PAGE_SIZE, 1, self.d_qk), math.nan)
        table = torch.full((len(self.own), max(shared, *pages) + 1), UNUSED, dtype=torch.int32)
        cache[order[:shared].long()] = torch.randn(shared, PAGE_SIZE, 1, self.d_qk, generator=draw) / 10
        first = shared
        for request, length in enumerate(lengths):
            own = 0 if length < self.prefix else shared
            table[request, :own] = order[:own]
            table[request, own : pages[request]] = order[first : first + pages[request] - own]
            first += pages[request] - own
            for page in range(own, pages[request]):
                keys = min(length - page * PAGE_SIZE, PAGE_SIZE)
                cache[int(table[request, page]), :keys] = torch.randn(keys, 1, self.d_qk, generator=draw) / 10
        q = torch.randn(len(self.own), self.s_q, self.heads, self.d_qk, generator=draw) / 10
        if self.is_fp8:
            q, cache = q / DESCALE_Q, cache / DESCALE_K
        return q.to(self.dtype), cache.to(self.dtype), table, torch.tensor(lengths, dtype=torch.int32)

    def descales(self) -> dict[str, Tensor]:
        return {"descale_q": DESCALE_Q, "descale_k": DESCALE_K} if self.is_fp8 else {}

    def run(self, q: Tensor | None = None, **options: Any) -> tuple[Tensor, Tensor]:
        """Return what decode_shared_prefix makes of the step, of `q` if given."""
        drawn, cache, table, lengths = self.operands()
        step = split_shared_prefix(table, lengths, self.prefix, PAGE_SIZE, self.causal)
        options = {"softmax_scale": SCALE, "batch_invariant": self.batch_invariant, **self.descales(), **options}
        return decode_shared_prefix(drawn if q is None else q, cache, step, **options)

    def expected(self) -> tuple[Tensor, Tensor]:
        """Return out and lse of each request by itself, in fp64."""
        q, cache, table, lengths = self.operands()
        scale_q, scale_k = (DESCALE_Q.double(), DESCALE_K.double()) if self.is_fp8 else (1.0, 1.0)
        outs, lses = [], []
        for request, length in enumerate(lengths.tolist()):
            k = reference.gather_pages(cache, table[request], length).double()[:, 0] * scale_k
            scores = q[request].transpose(0, 1).double() * scale_q @ k.T * SCALE
            scores = scores.masked_fill(~reference.visible_keys(self.s_q, length, self.causal, q.device), -math.inf)
            lse = scores.logsumexp(-1)
            outs.append(((scores - lse.clamp(min=-1e9).unsqueeze(-1)).exp() @ k[:, : value_columns(self.d_qk)]).transpose(0, 1))
            lses.append(lse.masked_fill(lse.isneginf(), math.inf))
        return torch.stack(outs), torch.stack(lses)


CALLS = {
    "own keys of 0, 1, 63, 64, 65": PrefixCall((0, 1, 63, 64, 65)),
    "no prefix": PrefixCall((70, 3), prefix=0),
    "causal": PrefixCall((2, 65, 130), s_q=2, heads=5, causal=True),
    "fp16, many rows": PrefixCall((1,) * 7, prefix=64, s_q=2, heads=16, causal=True, dtype=torch.float16),
    "e4m3": PrefixCall((0, 1, 65), dtype=torch.float8_e4m3fn),
    "256 + 64 columns": PrefixCall((0, 65), d_qk=320),
    "batch invariant": PrefixCall((2, 65), s_q=2, causal=True, batch_invariant=True),
    "shorter than the prefix": PrefixCall((-128, 3, -127, -64, -1, 0)),
    "all shorter": PrefixCall((-1, -70)),
    "first tokens that see a part of the prefix": PrefixCall((1, 0, 2, 10), s_q=3, causal=True),
}


def random_call(seed: int) -> PrefixCall:
    """Return a call of few requests, about a third of them shorter than the prefix."""
    draw = random.Random(seed)
    prefix, s_q = 64 * draw.randint(0, 4), draw.randint(1, 4)
    near = [own for own in (-prefix, -prefix + 1, -65, -64, -1, 0, 1, s_q - 2, s_q - 1, 63, 64, 200) if prefix + own >= 0]
    own = tuple(draw.choice((draw.choice(near), draw.randint(-prefix, 150))) for _ in range(draw.randint(1, 5)))
    dtype, d_qk = draw.choice(((torch.bfloat16, 576), (torch.float16, 576), (torch.float8_e4m3fn, 576), (torch.bfloat16, 320)))
    return PrefixCall(own, prefix, s_q, draw.choice((1, 3, 16)), draw.random() < 0.5, dtype, d_qk, draw.random() < 0.3, seed)


EVERY_CALL = {**CALLS, **{f"random {seed}": random_call(seed) for seed in range(6)}}


@pytest.mark.in_turn
@pytest.mark.parametrize("call", EVERY_CALL.values(), ids=EVERY_CALL.keys())
def test_agrees_with_the_reference(call: PrefixCall, arch: Arch) -> None:
    with simulate(arch.name):
        results = call.run()
    for name, tolerance, got, wanted in zip(
        ("out", "lse"), (FP8_DENSE_OUT if call.is_fp8 else DENSE_DECODE_OUT, LSE), results, call.expected(), strict=True
    ):
        comparison = compare(name, got, wanted, tolerance)
        assert comparison.passed, comparison.reason


@pytest.mark.in_turn
def test_takes_strided_queries(arch: Arch) -> None:
    call = CALLS["causal"]
    q = call.operands()[0]
    apart = torch.full((3, 2, 6, 576), math.nan, dtype=q.dtype)
    apart[:, :, :5] = q
    tokens_first = q.transpose(0, 1).contiguous().transpose(0, 1)  # its tokens are not one request without a copy
    with simulate(arch.name):
        wanted = call.run()
        for given in (apart[:, :, :5], tokens_first):
            for one, other in zip(call.run(given), wanted, strict=True):
                assert same_bits(one, other)


def test_bits_of_a_request_do_not_depend_on_the_batch(arch: Arch) -> None:
    call = PrefixCall((5, 330, 2, 260), prefix=512, s_q=2, heads=20, causal=True, batch_invariant=True)  # three row tiles, then two
    q, cache, table, lengths = call.operands()
    with simulate(arch.name, sm_count=3):
        out, lse = call.run()
    with simulate(arch.name, sm_count=14):
        step = split_shared_prefix(table[[3, 0]], lengths[[3, 0]], call.prefix, PAGE_SIZE, causal=True)
        fewer, fewer_lse = decode_shared_prefix(q[[3, 0]], cache, step, softmax_scale=SCALE, batch_invariant=True)
    assert same_bits(fewer, out[[3, 0]])
    assert same_bits(fewer_lse, lse[[3, 0]])


def test_a_request_shorter_than_the_prefix_has_the_bits_of_one_by_itself(arch: Arch) -> None:
    """Neither the prefix nor other requests' keys reach it, whichever row of the table it has."""
    call = PrefixCall((-30, 40, -128), s_q=2, causal=True, batch_invariant=True)
    q, cache, table, lengths = call.operands()
    with simulate(arch.name):
        out, lse = call.run()
        plan = get_mla_metadata()
        alone, alone_lse = flash_mla_with_kvcache(
            q[:1], cache, table[:1], lengths[:1], 512, *plan, softmax_scale=SCALE, causal=True, batch_invariant=True
        )
    assert same_bits(out[:1], alone)
    assert same_bits(lse[:1], alone_lse)


def test_lengths_outside_the_block_table_are_clipped() -> None:
    call = PrefixCall((64, 0))
    q, cache, table, _ = call.operands()
    with simulate("sm90"):
        steps = [
            split_shared_prefix(table[:, :3], torch.tensor(lengths).int(), 128, PAGE_SIZE)
            for lengths in ([192, 0], [(1 << 31) - 1, -(1 << 31)])
        ]
        (out, lse), (far_out, far_lse) = (decode_shared_prefix(q, cache, step) for step in steps)
    assert same_bits(out, far_out)
    assert same_bits(lse, far_lse)


def test_rows_without_keys_have_the_lse_that_is_asked_for() -> None:
    with simulate("sm90"):
        out, lse = PrefixCall((0, 3), prefix=0).run(empty_lse=-math.inf)
    assert lse[0].isneginf().all()
    assert not out[0].any()
    assert lse[1].isfinite().all()


def test_one_step_serves_all_layers() -> None:
    q, cache, table, lengths = CALLS["causal"].operands()
    with simulate("sm90"):
        step = split_shared_prefix(table, lengths, 128, PAGE_SIZE, causal=True)
        first, second = decode_shared_prefix(q, cache, step), decode_shared_prefix(q, cache, step)
    assert same_bits(first[0], second[0])
    assert same_bits(first[1], second[1])


@pytest.mark.parametrize("s_q", [0, 1])
def test_empty_batches(s_q: int) -> None:
    table, lengths = torch.zeros(0, 4, dtype=torch.int32), torch.zeros(0, dtype=torch.int32)
    with simulate("sm90"):
        step = split_shared_prefix(table, lengths, 128, PAGE_SIZE)
        out, lse = decode_shared_prefix(torch.zeros(0, s_q, 3, 576).bfloat16(), torch.zeros(4, 64, 1, 576).bfloat16(), step)
    assert (out.shape, lse.shape) == ((0, s_q, 3, 512), (0, 3, s_q))


TABLE, LENGTHS = torch.zeros(2, 3, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
BAD_SPLITS: list[tuple[str, dict[str, Any], str]] = [
    ("a part of a page", {"prefix_keys": 100}, "prefix_keys is 100 with pages of 64 .*; supported: multiples of 64 up to 192"),
    ("more pages than there are", {"prefix_keys": 256}, "prefix_keys is 256 .*; supported: multiples of 64 up to 192"),
    ("a negative prefix", {"prefix_keys": -64}, "prefix_keys is -64"),
    ("a length on the device", {"prefix_keys": torch.tensor(64)}, "prefix_keys is"),
    ("a page size", {"page_size": 65}, "page size is 65; supported"),
    ("causal", {"causal": 1}, "causal is 1"),
    ("no token", {"s_q": 0}, "s_q is 0; supported"),
    ("int64 lengths", {"cache_seqlens": LENGTHS.long()}, "cache_seqlens has dtype torch.int64; supported"),
    ("lengths of other requests", {"cache_seqlens": LENGTHS[:1]}, r"block_table has shape \[2, 3\]; supported: \[1, pages per request\]"),
    ("int64 block table", {"block_table": TABLE.long()}, "block_table has dtype torch.int64; supported"),
    ("flat block table", {"block_table": TABLE[0]}, "block_table has shape"),
]


@pytest.mark.parametrize(("changed", "message"), [bad[1:] for bad in BAD_SPLITS], ids=[bad[0] for bad in BAD_SPLITS])
def test_split_refuses(changed: dict[str, Any], message: str) -> None:
    given = {"block_table": TABLE, "cache_seqlens": LENGTHS, "prefix_keys": 64, "page_size": 64}
    with pytest.raises(ValueError, match=message):
        split_shared_prefix(**{**given, **changed})


def test_decode_refuses() -> None:
    q, cache, table, lengths = PrefixCall((1, 2)).operands()
    step = split_shared_prefix(table, lengths, 128, PAGE_SIZE)
    not_a_step: Any = None
    with simulate("sm90"):
        with pytest.raises(ValueError, match="step is None; supported: a SharedPrefix"):
            decode_shared_prefix(q, cache, not_a_step)
        with pytest.raises(ValueError, match=r"q has shape \[1, 1, 3, 576\]; supported with this step: \[2, s_q"):
            decode_shared_prefix(q[:1], cache, step)
        two = split_shared_prefix(table, lengths, 128, PAGE_SIZE, causal=True, s_q=2)
        with pytest.raises(ValueError, match="q has 3 query tokens with a causal step; supported with this step: 0 to 2"):
            decode_shared_prefix(q.expand(2, 3, 3, 576), cache, two)
        with pytest.raises(ValueError, match="softmax_scale is -1"):
            decode_shared_prefix(q, cache, step, softmax_scale=-1.0)


def test_compiles() -> None:
    """A compiled call has the bits of an eager one."""
    q, cache, table, lengths = CALLS["causal"].operands()

    def layer(q: Tensor, step: SharedPrefix) -> Tensor:
        return decode_shared_prefix(q, cache, step)[0]

    with simulate("sm90"):
        step = split_shared_prefix(table, lengths, 128, PAGE_SIZE, causal=True)
        assert same_bits(torch.compile(layer, backend="eager", fullgraph=True)(q, replace(step)), layer(q, step))
