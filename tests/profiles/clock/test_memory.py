"""Ways to memory on the clock: bulk copies, prefetches into L2, prefetch sizes of loads, and lines that begin where buffers begin."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from cute_mla.profiles.clock.spans import TMA
from cute_mla.simulator import TensorMap
from tests.profiles.clock.timed import H100, WARM, Timed, timed
from tests.simulator.small_kernels import Kernel, aligned

COLD = replace(WARM, cold=True)
HBM_BYTES = int(COLD.hbm_bytes)
SECTOR, LINE, BOX = 32, 128, 1024
ROWS, WIDTH = 16, 32  # of the box, in elements of two bytes


def pointers(number: int, step: int, start: int = 0) -> np.ndarray:
    """Return addresses `step` bytes apart, each that of the next, the last its own. start: of the first one, behind a multiple of 128."""
    array = aligned(number * step // 8 + LINE // 8, np.uint64)[start // 8 :][: number * step // 8]
    places = array.ctypes.data + step * np.arange(number, dtype=np.uint64)
    array[:: step // 8] = np.append(places[1:], places[-1])
    return array


def chase(number: int, load: str = "ld.global.u64", ahead: str = "") -> Kernel:
    """Return a kernel that follows pointers."""
    return Kernel(f"mov.u64 %rd4, %rd0; {ahead}\n" + f"{load} %rd4, [%rd4];\n" * number + "st.global.u64 [%rd0], %rd4;\n")


def from_hbm(nbytes: int) -> int:
    """Return the clocks of an ordinary load for which HBM gives so many bytes."""
    return H100.hbm_latency + nbytes // HBM_BYTES


@pytest.mark.parametrize("start", [0, 32, 64])
def test_a_buffer_begins_with_a_line_wherever_it_lies(start: int) -> None:
    run = timed(chase(6, "ld.global.L2::128B.u64"), pointers(6, 64, start), setting=COLD)
    assert run.gaps("LDG") == [from_hbm(LINE), H100.l2_latency] * 2 + [from_hbm(LINE)]


def test_each_sector_of_a_line_comes_from_hbm_once() -> None:
    run = timed(chase(9), pointers(9, SECTOR // 2), setting=COLD)
    assert run.gaps("LDG") == [from_hbm(SECTOR), H100.l2_latency] * 4


@pytest.mark.parametrize("opcode", ["prefetch.global.L2", "prefetch.global.L2::evict_last", "prefetch.global.L1"])
def test_a_prefetched_line_comes_from_l2_and_takes_its_bytes_of_hbm(opcode: str) -> None:
    run = timed(chase(4, ahead=f"{opcode} [%rd0+{2 * LINE}];"), pointers(4, LINE), setting=COLD)
    assert run.gaps("LDG") == [from_hbm(SECTOR), from_hbm(SECTOR), H100.l2_latency]
    plain = timed(chase(4), pointers(4, LINE), setting=COLD)
    assert plain.gaps("LDG") == [from_hbm(SECTOR)] * 3


def test_prefetches_take_their_share_of_hbm() -> None:
    ahead = f"mul.wide.u32 %rd12, %r0, {LINE}; add.s64 %rd12, %rd0, %rd12; prefetch.global.L2 [%rd12+4096];"
    run = timed(chase(4, ahead=ahead), pointers(4, LINE), setting=COLD)
    issued, load = run.issues("CCTL")[0], run.issues("LDG")[0]
    assert load + run.gaps("LDG")[0] == issued + from_hbm(32 * LINE + SECTOR)  # the load stands behind 32 lines


def test_a_load_right_behind_its_prefetch_gains_nothing() -> None:
    run = timed(chase(4, ahead="prefetch.global.L2 [%rd0];"), pointers(4, LINE), setting=COLD)
    first, *others = run.gaps("LDG")
    issued = run.issues("CCTL")[0]
    assert run.issues("LDG")[0] + first == issued + from_hbm(LINE)
    assert others == [from_hbm(SECTOR)] * 2


@pytest.mark.parametrize(("size", "gaps"), [
    (64, [from_hbm(SECTOR)] * 5),
    (128, [from_hbm(LINE)] * 5),
    (256, [from_hbm(2 * LINE), H100.l2_latency] * 2 + [from_hbm(2 * LINE)]),
])  # fmt: skip
def test_a_prefetch_size_makes_hbm_give_whole_lines(size: int, gaps: list[int]) -> None:
    run = timed(chase(6, f"ld.global.L2::{size}B.u64"), pointers(6, LINE), setting=COLD)
    assert run.gaps("LDG") == gaps


PREFETCHES = {
    "none": "",
    "lines": f"setp.lt.u32 %p23, %r0, {BOX // LINE}; mul.wide.u32 %rd12, %r0, {LINE}; add.s64 %rd12, %rd11, %rd12;"
    "@%p23 prefetch.global.L2 [%rd12];",
    "bytes": f"@!%p20 cp.async.bulk.prefetch.L2.global [%rd11], {BOX};",
    "box": "@!%p20 cp.async.bulk.prefetch.tensor.2d.L2.global.tile [%rd10, {%r102, %r102}];",
}  # fmt: skip
LOADS = {
    "box": "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
    "[%r100+1024], [%rd10, {%r102, %r102}], [%r100];",
    "bytes": f"cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r100+1024], [%rd11], {BOX}, [%r100];",
}


def run_copy(prefetch: str, load: str, hops: int, cold: bool = True, rows: int = ROWS) -> Timed:
    """Run a copy of a box, or of the same bytes, behind a prefetch and so many dependent loads from HBM. rows: of the tensor."""
    source = aligned(ROWS * WIDTH, np.uint16)
    box = TensorMap("bf16", source.ctypes.data, (WIDTH, rows), (2 * WIDTH,), (WIDTH, ROWS))
    body = f"""
    mov.b64 %rd10, p1; cvta.param.u64 %rd10, %rd10; ld.param.u64 %rd11, [p2]; mov.u32 %r102, 0; mov.u64 %rd4, %rd0;
    mov.u32 %r100, smem; setp.ne.u32 %p20, %r0, 0; {PREFETCHES[prefetch]} @%p20 bra LOADED;
    mbarrier.init.shared.b64 [%r100], 1; fence.mbarrier_init.release.cluster; {"ld.global.u64 %rd4, [%rd4];" * hops}
    st.global.u64 [%rd4], %rd4; mbarrier.arrive.expect_tx.shared.b64 %rd9, [%r100], {BOX}; {LOADS[load]}
    W: mbarrier.try_wait.parity.shared.b64 %p22, [%r100], 0; @!%p22 bra W;
    LOADED:
    """
    return timed(Kernel(body, smem=2048), pointers(4, LINE), box, source, setting=replace(COLD, cold=cold))


def length(run: Timed) -> int:
    """Return the clocks from the request of the one copy to its arrival."""
    (copy,) = [span for span in run.spans(TMA) if span.name == f"load {BOX} bytes"]
    return copy.end - copy.start


@pytest.mark.parametrize("load", LOADS)
def test_copies_by_tma_come_from_l2_or_from_hbm(load: str) -> None:
    assert length(run_copy("none", load, 2)) == BOX // HBM_BYTES + H100.copy_hbm_latency
    assert length(run_copy("none", load, 2, cold=False)) == BOX // H100.l2_bytes + H100.copy_l2_latency


@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("prefetch", [name for name in PREFETCHES if name != "none"])
def test_what_was_prefetched_is_copied_from_l2(prefetch: str, load: str) -> None:
    assert length(run_copy(prefetch, load, 2)) == BOX // H100.l2_bytes + H100.copy_l2_latency


@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("prefetch", ["bytes", "box"])
def test_a_copy_right_behind_its_prefetch_waits_for_hbm(prefetch: str, load: str) -> None:
    run = run_copy(prefetch, load, 0)
    (asked,) = [span for span in run.spans(TMA) if span.name == f"prefetch {BOX} bytes"]
    (copy,) = [span for span in run.spans(TMA) if span.name == f"load {BOX} bytes"]
    assert asked.end - asked.start == BOX // HBM_BYTES + H100.copy_hbm_latency - H100.copy_l2_latency
    assert copy.end == asked.end + H100.copy_l2_latency


@pytest.mark.parametrize("rows", [1, ROWS // 2, ROWS])
def test_a_box_asks_hbm_for_what_lies_inside_the_tensor(rows: int) -> None:
    run = run_copy("none", "box", 2, rows=rows)
    assert length(run) == rows * BOX // ROWS // HBM_BYTES + H100.copy_hbm_latency
    (asked,) = [span for span in run_copy("box", "box", 2, rows=rows).spans(TMA) if span.name.startswith("prefetch")]
    inside = rows * BOX // ROWS
    assert asked.name == f"prefetch {inside} bytes"
    assert asked.end - asked.start == inside // HBM_BYTES + H100.copy_hbm_latency - H100.copy_l2_latency


def test_a_pair_reads_a_box_of_both_from_hbm_once() -> None:
    source = aligned(ROWS * WIDTH, np.uint16)
    box = TensorMap("bf16", source.ctypes.data, (WIDTH, ROWS), (2 * WIDTH,), (WIDTH, ROWS))
    body = f"""
    mov.b64 %rd10, p1; cvta.param.u64 %rd10, %rd10; mov.u32 %r102, 0; mov.u32 %r100, smem; setp.ne.u32 %p20, %r0, 0; @%p20 bra LOADED;
    mbarrier.init.shared.b64 [%r100], 1; fence.mbarrier_init.release.cluster;
    mbarrier.arrive.expect_tx.shared.b64 %rd9, [%r100], {BOX}; {LOADS["box"]}
    W: mbarrier.try_wait.parity.shared.b64 %p22, [%r100], 0; @!%p22 bra W;
    LOADED: st.global.u32 [%rd2], %r0;
    """
    run = timed(Kernel(body, grid=2, cluster=2, smem=2048), aligned(32, np.uint32), box, source, setting=COLD)
    copies = [span for span in run.result.spans if span.track == TMA]
    assert sorted(span.rank for span in copies) == [0, 1]
    both = 2 * HBM_BYTES  # the shares of two SMs
    assert [span.end for span in copies] == [min(span.start for span in copies) + BOX // both + H100.copy_hbm_latency] * 2


def test_a_bulk_store_is_read_some_time_after_tma_has_taken_it() -> None:
    body = f"""
    mov.u32 %r100, smem; mad.lo.u32 %r101, %r0, 4, %r100; st.shared.u32 [%r101], %r0; fence.proxy.async; bar.sync 0;
    setp.ne.u32 %p20, %r0, 0; @%p20 bra END; cp.async.bulk.global.shared::cta.bulk_group [%rd0], [%r100], {LINE};
    cp.async.bulk.commit_group; cp.async.bulk.wait_group.read 0; END:
    """
    out = aligned(32, np.uint32)
    run = timed(Kernel(body, smem=128), out, setting=COLD)
    assert out.tolist() == list(range(32))
    (store,) = run.spans(TMA)
    assert (store.name, store.end) == ("store", store.start + H100.remote_latency)
    assert run.next_issue(run.issues("DEPBAR")[-1]) >= store.end
