"""PTX that several suites break."""

from __future__ import annotations

WAITS = r"mbarrier\.try_wait\.parity\.shared\.b64 +P1, [^;]*;"
NO_WAIT = "setp.eq.u32 P1, 0, 0;"
ARRIVALS = r"mbarrier\.arrive\.shared\.b64 [^;]*;"
CLUSTER_ARRIVALS = r"mbarrier\.arrive\.(?:release\.cluster\.)?shared(?:::cluster)?\.b64 [^;]*;"
EXPECTED_BYTES = r"(mbarrier\.arrive\.expect_tx[^;]*, )(?:%r\d+|\d+);"
EXPECTED_ARRIVALS = r"(mbarrier\.init\.shared\.b64 [^;]*, )(?:%r\d+|\d+);"
PAGES = r"(mov\.b32 \s*(%r\d+), -1;(?:[^;]*;){1,18}?\s*ld\.global\.b32 \s*\2, [^;]*;)"  # that a load role looks up in the block table
FIRST_PAGE = r"\1 max.s32 \2, \2, 0;"  # for a page below 0
TENSOR_COPIES = r"cp\.async\.bulk\.tensor[^;]*;"
COPY_WAITS = r"cp\.async\.wait_group \s*0;"
COPY_WAITS_BUT_ONE = r"cp\.async\.wait_group \s*1;"
COPY_WAITS_BUT_TWO = r"cp\.async\.wait_group \s*2;"
PEER_COPIES = r"cp\.async\.bulk\.shared::cluster[^;]*;"
PROXY_FENCES = r"fence\.proxy\.async[^;]*;"
FENCES_BEFORE = r"tcgen05\.fence::before_thread_sync;"
FENCES_AFTER = r"tcgen05\.fence::after_thread_sync;"
COMMITS = r"tcgen05\.commit[^;]*;"
PRODUCTS = r"tcgen05\.mma[^;]*;"
FILLS = r"collector::a::fill"
USE = "collector::a::use"
STORE_WAITS = r"tcgen05\.wait::st[^;]*;"
LOAD_WAITS = r"tcgen05\.wait::ld[^;]*;"
WGMMA_WAITS = r"wgmma\.wait_group\.sync\.aligned\s+\d;"
ZERO_STORES = r"st\.shared\.v4\.b32 \s*\[[^]]*\], \{0, 0, 0, 0\};"
BALLOTS = r"vote\.sync\.ballot\.b32 (\s*%r\d+), %p\d+, -1;"
SHUFFLES = r"shfl\.sync\.idx\.b32 (\s*%r\d+), (%r\d+), %r\d+, 31, -1;"
LANE_0 = r"shfl.sync.idx.b32 \1, \2, 0, 31, -1;"
RUNNING_MAXIMUM = r"max\.f32 \s*(%r\d+), \1, (%r\d+);"
LN_2 = "0f3F317218"
LOG2_E = "0f3FB8AA3B"
ONE = "0f3F800000"
# No sum from before: the first product of a tile by a constant.
FRESH_PRODUCTS = r"mov\.pred (\s*%p\d+), 0;(?=\s*mov\.b32 \s*%r\d+, \d+;\s*tcgen05\.mma)"
BOXES = r"mov\.b32 (\s*%r\d+), {};(?=(?:[^;]*;){{0,2}}?\s*cp\.async\.bulk\.tensor)"  # first column of a box: to be formatted in
PAIRS = r"(cvt\.rn\.bf16x2\.f32 \s*%r\d+), (%r\d+), (%r\d+);"
