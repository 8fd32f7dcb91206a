"""Bugs that users of other kernels for RTX boards and DGX Spark have reported, planted in ours, and what notices them.

    report (FI: flashinfer-ai/flashinfer)  bug, planted below or beside                   noticed by
    FI#3700, vllm#49026, vllm#51921        a named barrier is arrived at twice            race or poison, in random orders alone
    FI#5001, FI#5048                       a warp that waits and does not arrive          deadlock
                                           a reader of keys that is not counted           barrier_arrivals
    review of FI#3395                      a writer of keys that is not counted           barrier_arrivals
                                           which keys exist is stored behind the arrival  race
    FI#5075, FI#5095                       indices beyond topk_length are gathered        NaN
                                           a key for an index outside the cache           NaN
                                           NaN in masked keys                             NaN
                                           mask without effect (the suites of decode)     wrong numbers
    vllm#54434, FlashMLA#184               fp32 scales read as powers of two              wrong numbers
    FI#5015, vllm#49203                    a length of -1 is a large one                  NaN, lse, or other positions

Not planted: vllm#45317, more shared memory than a board has, which the build refuses.
"""

from __future__ import annotations

from dataclasses import replace

from cute_mla.spec.arch import SM120
from cute_mla.testing.operations.dense_decode.case import DenseDecodeCase
from cute_mla.testing.operations.sparse_decode.case import Pool, SparseDecodeCase
from cute_mla.testing.operations.topk_indices.case import TopkIndicesCase
from tests.mutation.planting import Planted, Suite, alone, each, planted, together

SPARSE = SparseDecodeCase(batch=3, h_q=9, main=Pool(150, 140, 61, lengths=(140, 70, -1)), indices="mixed", sm_count=1)
SHORT = replace(SPARSE, main=Pool(150, 140, 61, lengths=(3, 70, 1)))  # of whose indices most do not count
DENSE = DenseDecodeCase(batch=3, s_q=2, lengths=(140, 70, -1), h_q=7, causal=True, sm_count=1)
SELECTED = TopkIndicesCase(rows=8, columns=2600, topk=300, lengths="edges", values="random", outputs="given", sm_count=1)

SYNCS = r"bar\.sync \s*1, 128;"
TWICE = "bar.arrive 1, 128; bar.sync 1, 128;"
COUNTS = r"mbarrier\.init\.shared\.b64 \s*(\[[^]]*\]), %r\d+;"  # of keys ready, ready, free, free
ONE_LESS, ONE_MORE = (rf"mbarrier.init.shared.b64 \1, {count};" for count in (3, 5))
# which keys of a stage exist, stored in front of the barrier of the warp that signals their arrival
LAST_STORE = r"(st\.shared\.b32 [^;]*;\s*)(\$L\w+:\s*(?:add\.s32[^;]*;\s*)?bar\.warp\.sync(?:[^;]*;){5}\s*mbarrier\.arrive[^;]*;)"
LENGTH = r"ld\.param\.b64 (\s*%rd\d+), \[\w+_param_3\];"
CLIPPED = r"max\.s32 (\s*%r\d+), (%r\d+), 0;"
CLIPPED_LENGTH = r"(ld\.global\.b32 \s*(%r\d+), [^;]*;\s*)max\.s32 (\s*%r\d+), \2, 0;"
SLOTS = r"selp\.b64 (\s*%rd\d+), (%rd\d+), 0, %p\d+;"
# loads of keys and scales of which a predicate says whether they exist
NO_KEY = r"mov\.b32 (%r\d+), %r\d+;(?=[^{}]*@wanted ld\.global\.v4)"
SCALES = r"(mov\.b32 (%r\d+), %r\d+; @wanted ld\.global\.b32 \2, [^;]*;)"


def barriers(case: SparseDecodeCase | DenseDecodeCase) -> tuple[Planted, ...]:
    """Return the bugs of synchronisation, in the kernel of a case."""
    return (
        planted("a named barrier is arrived at twice", case, SYNCS, TWICE, each, count=4),
        planted("a writer of keys that is not counted", case, COUNTS, ONE_LESS, alone(0, 1), count=4),
        planted("a reader of keys that is not counted", case, COUNTS, ONE_LESS, alone(2, 3), count=4),
        planted("a warp that waits and does not arrive", case, COUNTS, ONE_MORE, each, count=4),
    )


SUITES = {
    "reported_sm120_sparse_decode": Suite(
        SM120,
        {"656": SPARSE, "short": SHORT},
        (
            *barriers(SPARSE),
            planted("which keys exist is stored behind the arrival", SPARSE, LAST_STORE, r"\2 \1", together, count=1),
            planted("indices beyond topk_length are gathered", SHORT, LENGTH, r"mov.b64 \1, 0;", together),
            planted("a key for an index outside the cache", SPARSE, SLOTS, r"mov.b64 \1, \2;", together, count=2),
            planted("NaN in masked keys", SPARSE, NO_KEY, r"mov.b32 \1, 0x7FFF7FFF;", together),
            planted("fp32 scales read as powers of two", SPARSE, SCALES, r"\1 and.b32 \2, \2, -8388608;", together),
            planted("a length of -1 is a large one", SPARSE, CLIPPED, r"and.b32 \1, \2, 0x7FFFFFFF;", together),
        ),
    ),
    "reported_sm120_dense_decode": Suite(
        SM120,
        {"walk": DENSE},
        (
            *barriers(DENSE),
            planted("NaN in masked keys", DENSE, NO_KEY, r"mov.b32 \1, 0x7FFF7FFF;", together),
            planted("a length of -1 is a large one", DENSE, CLIPPED_LENGTH, r"\1and.b32 \3, \2, 0x7FFFFFFF;", together),
        ),
    ),
    "reported_sm120_topk_indices": Suite(
        SM120,
        {"edges": SELECTED},
        (planted("a length of -1 is a large one", SELECTED, CLIPPED_LENGTH, r"\1and.b32 \3, \2, 0x7FFFFFFF;", together),),
    ),
}
