"""Small cases for each op: enough tiles to go round every ring, several pieces for a CTA, some of them empty."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from cute_mla.spec.arch import Arch
from cute_mla.spec.cache_rows import CACHED
from cute_mla.spec.topk_indices import RESIDENT, WIDE
from cute_mla.testing.cases.base import BaseCase
from cute_mla.testing.operations.cache_gather.case import CacheGatherCase
from cute_mla.testing.operations.cache_insert.case import CacheInsertCase
from cute_mla.testing.operations.cache_write.case import CacheWriteCase
from cute_mla.testing.operations.dense_decode.case import DenseDecodeCase
from cute_mla.testing.operations.dense_prefill.case import DensePrefillCase
from cute_mla.testing.operations.dense_prefill_backward.case import DensePrefillBackwardCase
from cute_mla.testing.operations.index_write.case import IndexWriteCase
from cute_mla.testing.operations.indexer_topk.case import IndexerTopkCase
from cute_mla.testing.operations.merge_states.case import MergeStatesCase
from cute_mla.testing.operations.mqa_logits.case import MqaLogitsCase
from cute_mla.testing.operations.sparse_decode.case import Pool, SparseDecodeCase
from cute_mla.testing.operations.sparse_prefill.case import SparsePrefillCase
from cute_mla.testing.operations.topk_indices.case import TopkIndicesCase

DENSE = DenseDecodeCase(batch=3, s_q=2, lengths=(500, 70, 300), h_q=9, causal=True)
GAPS = replace(DENSE, batch=8, lengths=(60, 0, 60, 0, 0, 60, 0, 60))  # a role with nothing to do may run ahead
RISING = DenseDecodeCase(batch=2, lengths=(400, 200), h_q=9, values="rising")  # O is rescaled again and again
SPLIT = DenseDecodeCase(batch=2, lengths=(700, 130), h_q=9, sm_count=8)  # for the kernels around it, on more SMs than it has requests
PARTS = replace(SPLIT, lengths=(4000, 130), sm_count=80)  # more parts than a warp has threads, most of them of one request
WHOLE = replace(PARTS, batch=3, lengths=(10, 10, 10))  # and no request is cut
UNITS = replace(SPLIT, batch=3, lengths=(700, 130, 60), tokens=(20, 0, 3), causal=True)  # more units than requests
SPARSE = SparseDecodeCase(batch=2, h_q=9, main=Pool(400, 390, 61, lengths=(390, 70)), indices="mixed", sinks="drawn")
TOKENS = SparsePrefillCase(s_q=6, h_q=9, s_kv=250, topk=250, lengths=(130, 200, 200, 70, 250, 0), indices="mixed", sinks="drawn")
INDEXER = replace(TOKENS, indexer_topk=100)  # lse_indexer ends within the second tile of longer tokens
PREFILL = DensePrefillCase(lengths=((130, 129), (0, 40), (64, 257), (5, 0), (3, 165)), causal=True, values="falling", outputs="given")
FEW = replace(TOKENS, s_q=8, lengths=(60, 0, 60, 0, 0, 60, 0, 60))
# so many items that every ring of them is gone round, those of a second block of rows, too
MANY = replace(PREFILL, lengths=((5, 64), (140, 100), (0, 3), (130, 140)) * 2)

# of the backward pass: rows and keys enough to go round the rings of either kernel
GRADIENTS = DensePrefillBackwardCase(lengths=((130, 200), (0, 40), (5, 0), (64, 257), (3, 65)), group=2, causal=True, outputs="given")

# of the indexer: a CTA has items enough to go round their ring, and tiles to go twice round that of the keys; some see nothing
LOGITS = MqaLogitsCase(tokens=34, keys=700, windows="edges", outputs="given")
PAGES = MqaLogitsCase(requests=7, tokens=9, keys=700, page_size=16, lengths="edges", outputs="given")
SELECTED = TopkIndicesCase(rows=2, columns=1025, topk=300, outputs="given", sm_count=1)

CASES: dict[str, tuple[BaseCase, ...]] = {
    "dense_decode": (DENSE, RISING, GAPS),
    "sparse_decode": (
        SPARSE,
        replace(SPARSE, cache="fp8_584"),
        replace(SPARSE, cache="latent"),
        replace(SPARSE, cache="v41_paged", extra=Pool(80, 70)),
        replace(SPARSE, cache="nope_528"),
        replace(SPARSE, cache="v41", extra_cache="v41_fp4", extra=Pool(200, 190, 16)),
        *(replace(SPARSE, cache=cache, values="rising") for cache in ("fp8_656", "fp8_584", "latent")),
    ),
    "sparse_prefill": tuple(replace(case, d_qk=d_qk) for d_qk in (576, 512) for case in (INDEXER, replace(TOKENS, values="rising"), FEW)),
    "dense_prefill": tuple(replace(case, d_qk=d_qk) for d_qk in (192, 128) for case in (PREFILL, MANY)),
    "masked_prefill": tuple(replace(case, d_qk=d_qk, causal=False, mask="single") for d_qk in (192, 128) for case in (PREFILL, MANY)),
    "dense_prefill_dq": tuple(replace(GRADIENTS, d_qk=d_qk) for d_qk in (192, 128, 256)),
    "dense_prefill_dkdv": tuple(replace(GRADIENTS, d_qk=d_qk) for d_qk in (192, 128, 256)),
    "combine": (SPLIT,),
    "split_plan": (UNITS, PARTS, WHOLE),
    "merge_states": (MergeStatesCase(states=3, tokens=3, h_q=9, outputs="given"),),
    "mqa_logits": tuple(
        replace(case, heads=heads, clean=clean) for heads in (33, 32) for clean in (True, False) for case in (LOGITS, PAGES)
    ),
    "topk_indices": (
        SELECTED,
        replace(SELECTED, values="few"),
        replace(SELECTED, values="narrow"),
        replace(SELECTED, columns=WIDE * RESIDENT + 1000, sm_count=8),  # more than the CTAs of a row keep
        replace(SELECTED, columns=2600, values="few", sm_count=8),
        replace(SELECTED, columns=2600, values="narrow", sm_count=8),
        *(
            IndexerTopkCase(requests=2, tokens=1, keys=keys, heads=8, page_size=64, topk=300, slots=True, outputs="given")
            for keys in (1000, 2600)
        ),
    ),
    "index_write": tuple(
        replace(case, tokens=9, hadamard=hadamard)
        for case in (
            IndexWriteCase(),
            IndexWriteCase(rope="interleaved", scale_format="ue8m0"),
            IndexWriteCase(rows="queries", heads=3),
            IndexWriteCase(rows="queries", heads=3, rope="interleaved"),
        )
        for hadamard in (False, True)
    ),
    "cache_write": tuple(CacheWriteCase(cache=cache, tokens=9) for cache in CACHED),
    "cache_insert": tuple(CacheInsertCase(cache=cache, tokens=9, kept="packed") for cache in CACHED),
    "cache_gather": tuple(CacheGatherCase(cache=cache, lengths=(6, 0, 5)) for cache in CACHED),
}
AROUND = ("combine", "split_plan")  # kernels that the calls of other ops launch
HEADS = {"dense_decode": (9, 64), "sparse_decode": (9, 17, 128), "sparse_prefill": (9, 128)}  # few, one row tile, and two


def cases(op: str, arch: Arch) -> Iterator[BaseCase]:
    """Yield cases of an op that reach all its kernels; those in front are the ones to begin with."""
    if op in AROUND:
        yield from CASES[op]
        return
    pair = 1 if arch.name == "sm90" else 2
    for heads in HEADS.get(op, (None,)):
        for case in CASES.get(op, ()):
            more = {} if heads is None else {"h_q": heads}
            sms = 1 if heads is None else pair if heads < 64 else 2
            yield replace(case, sm_count=case.sm_count or sms, **more)  # type: ignore[arg-type]
