"""Every argument of every function in every way in which an argument can be wrong: the call is refused by name, and launches nothing."""

from __future__ import annotations

from collections import Counter

import pytest

from cute_mla.testing.operations.cache_gather.case import CacheGatherCase
from cute_mla.testing.operations.cache_insert.case import CacheInsertCase
from cute_mla.testing.operations.cache_write.case import CacheWriteCase
from cute_mla.testing.operations.dense_decode.case import DenseDecodeCase
from cute_mla.testing.operations.dense_prefill.case import DensePrefillCase
from cute_mla.testing.operations.dense_prefill_backward.case import DensePrefillBackwardCase
from cute_mla.testing.operations.head_sums.case import HeadSumsCase
from cute_mla.testing.operations.index_write.case import IndexWriteCase
from cute_mla.testing.operations.indexer_backward.case import IndexerBackwardCase
from cute_mla.testing.operations.indexer_topk.case import IndexerTopkCase
from cute_mla.testing.operations.merge_states.case import MergeStatesCase
from cute_mla.testing.operations.mqa_logits.case import MqaLogitsCase
from cute_mla.testing.operations.sparse_decode.case import Pool, SparseDecodeCase
from cute_mla.testing.operations.sparse_prefill.case import SparsePrefillCase
from cute_mla.testing.operations.sparse_prefill_backward.case import SparsePrefillBackwardCase
from cute_mla.testing.operations.topk_indices.case import TopkIndicesCase
from tests.fuzz.calls import AnyCase, Break, FuzzCall, PlanCase, RowsCase, Setting
from tests.fuzz.judging import SUBJECTS, judge

VARLEN = DensePrefillCase(lengths=((5, 9), (3, 4)), h_kv=2, group=2, outputs="given")
PACKED = DensePrefillCase(lengths=((5, 5), (3, 3)), h_kv=2, outputs="given", ends="clipped")

# Right calls, all of whose optional tensors are given where one call can have them.
CALLS: tuple[tuple[str, AnyCase], ...] = (
    ("dense_decode", DenseDecodeCase(batch=2, s_q=2, lengths=(5, 2), h_q=6, h_kv=2, outputs="given", metadata="tensors", sinks="drawn")),
    ("dense_decode", DenseDecodeCase(batch=2, s_q=2, lengths=(5, 2), h_q=3, outputs="given", tree="drawn")),
    ("dense_decode", DenseDecodeCase(batch=2, lengths=(5, 2), h_q=3, outputs="given", operands="fp8")),
    ("dense_decode", DenseDecodeCase(batch=2, tokens=(1, 2), lengths=(5, 2), h_q=3, outputs="given")),
    *(
        (
            "sparse_decode",
            SparseDecodeCase(
                cache=cache,
                batch=2,
                h_q=3,
                main=Pool(9, 5, 16, (5, 2)),
                extra=Pool(9, 4, 2, (3, 4)),
                sinks="drawn",
                outputs="given",
            ),
        )
        for cache in ("fp8_656", "fp8_584", "v41")
    ),
    ("sparse_decode", SparseDecodeCase(cache="latent", batch=3, tokens=(1, 2), h_q=3, main=Pool(9, 5, 16, (5, 2, 3)), outputs="given")),
    ("sparse_prefill", SparsePrefillCase(s_q=3, h_q=3, s_kv=9, topk=5, lengths=(5, 2, 0), sinks="drawn", outputs="given", indexer_topk=2)),
    ("sparse_prefill", SparsePrefillCase(batch=2, form="ragged", s_q=3, h_q=3, s_kv=9, topk=5, outputs="given")),
    ("sparse_prefill", SparsePrefillCase(batch=2, form="batched", s_q=3, h_q=3, s_kv=9, topk=5, lengths="drawn", outputs="given")),
    ("sparse_prefill_backward", SparsePrefillBackwardCase(s_q=3, h_q=3, s_kv=9, topk=5, sinks="drawn", outputs="given", dlse=True)),
    ("attention_head_sums", HeadSumsCase(s_q=3, h_q=3, s_kv=9, topk=5, lengths=(5, 2, 0), sinks="drawn", outputs="given")),
    ("indexer_scores", HeadSumsCase(batch=2, form="ragged", s_q=3, h_q=3, d_qk=128, s_kv=9, topk=5, outputs="given")),
    ("indexer_scores", HeadSumsCase(s_q=3, h_q=3, d_qk=128, s_kv=9, topk=5)),
    ("indexer_backward", IndexerBackwardCase(s_q=3, h_q=3, s_kv=9, topk=5, lengths=(5, 2, 0), outputs="given")),
    ("indexer_loss", RowsCase(trained=True)),
    ("dense_prefill", VARLEN),
    ("dense_prefill", DensePrefillCase(lengths=((5, 9), (3, 4)), d_qk=128, mask="random", outputs="given")),
    ("dense_prefill_kvpacked", VARLEN),
    ("dense_prefill_qkvpacked", PACKED),
    ("dense_prefill_backward", DensePrefillBackwardCase(lengths=((5, 9), (3, 4)), h_kv=2, group=2, outputs="given", saved="given")),
    ("merge_states", MergeStatesCase(form="stacked", outputs="given")),
    ("merge_states", MergeStatesCase(outputs="given")),
    ("topk_indices", TopkIndicesCase(rows=3, columns=40, topk=8, outputs="given")),
    ("fp8_mqa_logits", MqaLogitsCase(heads=3, tokens=3, keys=20, outputs="given")),
    ("fp8_paged_mqa_logits", MqaLogitsCase(heads=3, requests=2, tokens=2, keys=20, page_size=16, outputs="given")),
    ("indexer_topk", IndexerTopkCase(heads=3, requests=2, tokens=2, keys=20, page_size=16, topk=4, outputs="given")),
    ("get_mla_metadata", PlanCase(lengths=(64, 3))),
    ("get_mla_metadata", PlanCase(lengths=(64, 3), topk=64)),
    *(("write_kv_cache", CacheWriteCase(cache=cache, tokens=3)) for cache in ("latent", "fp8_576", "fp8_584")),
    *(("insert_kv_cache", CacheInsertCase(cache=cache, tokens=3, heads=2, kept="packed")) for cache in ("latent", "fp8_576", "fp8_584")),
    *(("gather_kv_cache", CacheGatherCase(cache=cache, lengths=(3, 2), starts=(1, 0), outputs="given")) for cache in ("latent", "fp8_584")),
    ("write_index_cache", IndexWriteCase(rows="keys", tokens=3)),
    ("prepare_index_queries", IndexWriteCase(rows="queries", tokens=3, heads=2, outputs="given")),
)

CACHED = ("dense_decode", "sparse_decode")  # whose right calls are found again, unchecked: the same is refused behind one

WAYS = (
    *(Break("", how, amount) for how, amount in (("dtype", 0), ("dtype", 3), ("rank", 0), ("rank", 5), ("scaled", 1), ("layout", 7))),
    *(Break("", how) for how in ("absent", "thing", "longer", "strided", "padded", "expanded", "meta")),
)


@pytest.mark.parametrize(("subject", "case"), CALLS, ids=[f"{subject}-{index}" for index, (subject, _) in enumerate(CALLS)])
def test_every_argument_is_refused_in_every_way(subject: str, case: AnyCase) -> None:
    """Let the contract, written from the documentation, decide whether a call is wrong."""
    kinds: Counter[str] = Counter()
    for argument in SUBJECTS[subject].breakable:
        for way in WAYS:
            call = FuzzCall(subject, case, Setting("sm90", sm_count=2), (Break(argument, way.how, way.amount),), again=subject in CACHED)
            kinds[judge(call, refusals_only=True).kind] += 1
    assert kinds["refused"] > kinds["right"]
