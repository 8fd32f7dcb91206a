"""Strategies of right calls of functions that have no record of an op."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from cute_mla.spec.arch import ALIASES, ARCHS
from cute_mla.spec.cache_rows import KNOWN
from cute_mla.testing.runner import SCHEDULES
from tests.fuzz.calls import BatchCase, CacheCase, PlainCase, PlanCase, RowsCase

SIZES = st.sampled_from((0, 1, 2, 15, 16, 63, 64, 65, 100, 128, 129))  # around tiles, and none
HEADS = st.sampled_from((1, 2, 3, 7, 16, 33, 63, 64, 65, 127, 128)) | st.integers(1, 128)
SEEDS = st.integers(0, 99)


@st.composite
def plan_cases(draw: st.DrawFn) -> PlanCase:
    """Draw plans that are made at once."""
    h_kv = draw(st.integers(1, 4))
    topk = draw(st.none() | SIZES)
    size = st.sampled_from((-(1 << 31), -1, 0, 1, 64, 65, 1000, 70_000)) | st.integers(0, 5000)
    return PlanCase(
        lengths=tuple(draw(st.lists(size, max_size=9))),
        s_q=draw(st.integers(1, 5)),
        h_kv=h_kv if topk is None else 1,
        group=draw(st.integers(1, 128 // h_kv)),
        topk=topk,
    )


@st.composite
def cache_cases(draw: st.DrawFn) -> CacheCase:
    """Draw caches of every format."""
    return CacheCase(
        cache_format=draw(st.sampled_from(tuple(KNOWN))),
        pages=draw(st.integers(0, 3)),
        page_size=draw(st.integers(0, 5)),
        padding=draw(st.sampled_from((0, 1, 16, 100))),
        power_of_two=draw(st.booleans()),
        given=draw(st.booleans()),
        seed=draw(SEEDS),
    )


@st.composite
def batch_cases(draw: st.DrawFn) -> BatchCase:
    """Draw steps of a layer."""
    count, decodes = draw(st.integers(0, 4)), draw(st.integers(0, 4))
    decodes, new = min(decodes, count), draw(st.integers(1, 3))
    lengths = [(new if i < decodes else draw(st.integers(0, 70)), draw(st.integers(0, 200))) for i in range(count)]
    return BatchCase(
        tuple(lengths), decodes, draw(st.sampled_from((16, 32, 64, 128))), draw(st.sampled_from((1, 7, 64, 8192))), draw(st.booleans())
    )


def rows_cases() -> st.SearchStrategy[RowsCase]:
    """Draw rows of an indexer's scores."""
    leading = st.lists(st.integers(0, 3), max_size=3)
    shape = st.builds(lambda sizes, topk: (*sizes, topk), leading, st.sampled_from((1, 2, 3, 63, 64, 65, 300)) | st.integers(1, 40))
    return st.builds(RowsCase, shape, st.sampled_from((0.0, 0.3, 0.9, 1.0)), st.sampled_from((0.1, 3.0, 60.0)), st.booleans(), SEEDS)


_FLAGS = ("causal", "batch_invariant", "fp8_kvcache", "attn_sink", "extra_cache", "topk_length", "kv_offsets")
_FEATURES: dict[str, st.SearchStrategy[Any]] = {
    "dtype": st.sampled_from(("bf16", "fp16", "e4m3")),
    "h_q": HEADS,
    "h_kv": st.integers(1, 4),
    "s_q": st.integers(1, 70_000),
    "head_dim": st.sampled_from((1088, 576, 512, 256, 192, 128)),
    "head_dim_v": st.sampled_from((1024, 512, 256, 128)),
    "page_size": st.sampled_from((16, 32, 64, 128, 1, None)),
    "topk": st.none() | st.integers(0, 300),
    **dict.fromkeys(_FLAGS, st.booleans()),
}
_ODD_VALUES = st.sampled_from((None, -1, 0, 1, 2, 64, 128, 129, 512, 576, 1 << 40, 2.5, 64.0, float("nan"), "64", "bf16", True, False))


def _chosen(**values: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({}, optional=values)


def plain_cases(subject: str) -> st.SearchStrategy[PlainCase]:
    """Draw calls of a subject that takes plain values."""
    ops = st.sampled_from(("dense_decode", "sparse_decode", "dense_prefill", "sparse_prefill"))
    strategies: dict[str, st.SearchStrategy[dict[str, Any]]] = {
        "workspace_size": st.fixed_dictionaries(
            {"op": ops, "batch": st.integers(0, 50), "s_q": st.integers(0, 5), "h_q": HEADS},
            optional={
                "h_kv": st.integers(1, 4),
                "batch_invariant": st.booleans(),
                "max_cache_seqlen": st.integers(0, 100_000),
                "topk": st.integers(0, 70_000),
            },
        ).map(lambda given: {**given, "device": "cpu"}),
        "is_supported": st.builds(
            lambda op, arch, features: {"op": op, "arch": arch, **features},
            ops,
            st.sampled_from((*ARCHS, *ALIASES)),
            _chosen(**{name: values | _ODD_VALUES for name, values in _FEATURES.items()}),
        ),
        "fingerprint": st.builds(
            lambda op, arch, needed, features: {"op": op, "arch": arch, **needed, **features},
            ops,
            st.sampled_from((*ARCHS, *ALIASES)),
            st.fixed_dictionaries({"head_dim": st.sampled_from((576, 192)), "h_q": HEADS}),
            _chosen(few_heads=st.booleans(), **_FEATURES),
        ),
        "simulate": _chosen(
            arch=st.sampled_from(tuple(ARCHS)),
            sm_count=st.none() | st.integers(1, 200),
            schedule=st.sampled_from(SCHEDULES),
            seed=st.integers(0, 1 << 40),
            on_finding=st.sampled_from(("raise", "collect")),
        ),
        "empty_cache": st.fixed_dictionaries(
            {"cache_format": st.sampled_from(tuple(KNOWN)), "pages": st.integers(0, 4), "page_size": st.integers(0, 9)},
            optional={"page_stride": st.none() | st.integers(0, 8000), "fill": st.integers(0, 255)},
        ),
        "MlaConfig": st.fixed_dictionaries(
            {
                "hidden_size": st.integers(1, 8000),
                "num_attention_heads": st.integers(1, 128),
                "q_lora_rank": st.none() | st.integers(1, 1600),
            },
            optional={
                "rms_norm_eps": st.floats(1e-9, 1.0),
                "rope_theta": st.floats(1.0, 1e9),
                "output_gate": st.sampled_from((None, "head", "column")),
                **{name: st.booleans() for name in ("rope_interleave", "mla_use_nope", "mla_scale_kv_lora", "attention_sinks")},
                **{name: st.booleans() for name in ("softmax_scaling", "learned_frequencies")},
                "latents": st.sampled_from(("own", "lent", "borrowed")),
            },
        ),
        "YarnScaling": st.fixed_dictionaries(
            {"factor": st.floats(0.5, 100), "original_max_position_embeddings": st.integers(1, 1 << 20)},
            optional={"mscale": st.floats(0, 10), "mscale_all_dim": st.floats(0, 10), "beta_fast": st.floats(2, 64)},
        ),
    }
    return strategies[subject].map(lambda given: PlainCase(tuple(given.items())))
