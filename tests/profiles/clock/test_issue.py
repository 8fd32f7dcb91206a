"""Issue of the clock: stall counts, scoreboards, pipes, schedulers and latencies, on kernels whose time is derived by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from cute_mla.profiles.clock.engine import Setting
from cute_mla.profiles.clock.instructions import UnknownTimeError, time_listing
from cute_mla.profiles.clock.spans import ISSUE, PORT
from tests.profiles.clock.timed import H100, WARM, timed
from tests.simulator.small_kernels import Kernel, aligned


def chain(line: str, number: int) -> str:
    """Return a chain of floats %f1: loaded, changed by each of so many lines, and stored."""
    return "ld.global.f32 %f1, [%rd2];\n" + f"{line}\n" * number + "st.global.f32 [%rd2], %f1;\n"


def ones(threads: int = 32) -> np.ndarray:
    """Return a word for each thread."""
    array = aligned(threads, np.float32)
    array[:] = 1.0
    return array


def test_an_undisturbed_warp_takes_its_stall_counts() -> None:
    run = timed(Kernel(chain("fma.rn.f32 %f1, %f1, %f1, 0f3F000000;", 20)), ones())
    steps = [span for span in run.spans("0") if span.name == ISSUE and run.code[span.address].base == "FFMA"]
    assert len(steps) == 20
    stalls = [run.code[span.address].control.stall for span in steps]
    assert stalls[0] == 4  # a result of FFMA is there after four clocks
    assert np.diff([span.start for span in steps]).tolist() == stalls[:-1]


def test_a_chain_of_exponentials_waits_for_each_result() -> None:
    run = timed(Kernel(chain("ex2.approx.ftz.f32 %f1, %f1;", 10)), ones())
    assert run.gaps("MUFU") == [H100.mufu_latency] * 9


def test_exponentials_of_warps_of_one_scheduler_take_the_unit_in_turn() -> None:
    run = timed(Kernel(chain("ex2.approx.ftz.f32 %f1, %f1;", 10), threads=512), ones(512))
    taken = sorted(clock for warp in (0, 4, 8, 12) for clock in run.issues("MUFU", warp))
    gaps = np.diff(taken).tolist()
    assert len(taken) == 40
    assert min(gaps) == H100.mufu_clocks  # four chains of 18 clocks a result would take 4.5 clocks each
    assert sum(gaps[:30]) <= 30 * H100.mufu_clocks + 20


def independent(number: int) -> str:
    """Return products of floats of which none needs another; their results are added up and stored."""
    body = "ld.global.f32 %f1, [%rd2];\nld.global.f32 %f2, [%rd2];\n"
    body += "".join(f"fma.rn.f32 %f{index}, %f1, %f2, 0f{0x3F800000 + index:08X};\n" for index in range(3, 3 + number))
    body += "".join(f"max.f32 %f3, %f3, %f{index};\n" for index in range(4, 3 + number))
    return body + "st.global.f32 [%rd2], %f3;\n"


def test_warps_of_one_scheduler_share_its_issue_slots() -> None:
    run = timed(Kernel(independent(16), threads=512), ones(512))
    shared = [clock for warp in (0, 4, 8, 12) for clock in run.issues("", warp)]
    assert len(set(shared)) == len(shared)  # an instruction a clock
    products = [clock for warp in (0, 4, 8, 12) for clock in run.issues("FFMA", warp)]
    assert len(products) == 64
    assert max(products) - min(products) >= 63
    of_others = [clock for warp in range(4) for clock in run.issues("", warp)]
    assert len(set(of_others)) < len(of_others)  # each of the four warps has a scheduler of its own


@pytest.mark.parametrize(("stride", "turns"), [(4, 1), (8, 2), (128, 32)])
def test_lanes_that_share_a_bank_go_one_after_the_other(stride: int, turns: int) -> None:
    body = f"""
    mov.u32 %r1, smem; mad.lo.u32 %r2, %r0, {stride}, %r1; st.shared.u32 [%r2], %r2; bar.warp.sync -1;
    {"ld.shared.u32 %r2, [%r2];" * 6} st.global.u32 [%rd2], %r2;
    """
    run = timed(Kernel(body, smem=4096), ones())
    # Each load needs the address that the one before has brought.
    assert run.gaps("LDS")[1:] == [H100.shared_latency + turns - 1] * 4  # the first one finds the store's turns in the port
    loads = [span for span in run.spans(PORT) if span.name == "LDS"]
    assert [span.end - span.start for span in loads] == [turns] * 6


def test_wide_words_go_by_quarters_of_a_warp() -> None:
    body = """
    mov.u32 %r1, smem; mad.lo.u32 %r2, %r0, 16, %r1; mov.u32 %r3, 0; st.shared.v4.u32 [%r2], {%r2, %r3, %r3, %r3}; bar.warp.sync -1;
    ld.shared.v4.u32 {%r2, %r3, %r4, %r5}, [%r2]; st.global.u32 [%rd2], %r3;
    """
    run = timed(Kernel(body, smem=4096), ones())
    assert [span.end - span.start for span in run.spans(PORT) if span.name == "LDS"] == [4]


@pytest.mark.parametrize(("kind", "words"), [("u32", 1), ("v4.u32", 4)])
def test_spilled_registers_go_through_the_port(kind: str, words: int) -> None:
    registers = "%r2" if words == 1 else "{%r2, %r3, %r4, %r5}"
    address = "or.b32 %r2, %r2, %r3; or.b32 %r4, %r4, %r5; or.b32 %r2, %r2, %r4; cvt.u64.u32 %rd5, %r2; add.s64 %rd5, %rd5, %rd4;"
    body = f"""
    .local .align 16 .b8 stack[64]; mov.u64 %rd4, stack; mov.u32 %r2, 0; mov.u32 %r3, 0; mov.u32 %r4, 0; mov.u32 %r5, 0;
    ld.global.u32 %r6, [%rd2]; and.b32 %r6, %r6, 16; cvt.u64.u32 %rd5, %r6; add.s64 %rd5, %rd5, %rd4;
    st.local.{kind} [%rd5], {registers}; st.local.{kind} [%rd5+16], {registers};
    {f"{address} ld.local.{kind} {registers}, [%rd5];" * 5} {address} st.global.u32 [%rd2], %r2;
    """
    run = timed(Kernel(body), ones())
    loads = [span for span in run.spans(PORT) if span.name == "LDL"]
    stores = [span for span in run.spans(PORT) if span.name == "STL"]
    assert [span.end - span.start for span in loads + stores] == [words] * 7
    gaps = run.gaps("LDL")[1:]  # each load needs the address that the one before has brought, and an addition
    assert all(H100.l1_latency + words - 1 <= gap <= H100.l1_latency + words + 15 for gap in gaps)


def pointers(number: int, step: int) -> np.ndarray:
    """Return addresses `step` bytes apart, each that of the next; the last is its own."""
    array = aligned(number * step // 8, np.uint64)
    places = array.ctypes.data + step * np.arange(number, dtype=np.uint64)
    array[:: step // 8] = np.append(places[1:], places[-1])
    return array


@pytest.mark.parametrize("cold", [False, True])
def test_a_dependent_load_waits_for_l2_or_for_memory(cold: bool) -> None:
    body = "mov.u64 %rd4, %rd0;\n" + "ld.global.u64 %rd4, [%rd4];\n" * 6 + "st.global.u64 [%rd0], %rd4;\n"
    run = timed(Kernel(body), pointers(6, 128), setting=replace(WARM, cold=cold))
    # Of each line one sector of 32 bytes: half a clock from L2, two from this share of memory.
    expected = H100.hbm_latency + 2 if cold else H100.l2_latency
    assert run.gaps("LDG") == [expected] * 5


def test_a_sector_is_in_l2_from_its_second_load_on() -> None:
    body = "mov.u64 %rd4, %rd0;\n" + "ld.global.u64 %rd4, [%rd4];\n" * 6 + "st.global.u64 [%rd0], %rd4;\n"
    run = timed(Kernel(body), pointers(6, 16), setting=replace(WARM, cold=True))
    assert run.gaps("LDG") == [H100.hbm_latency + 2, H100.l2_latency] * 2 + [H100.hbm_latency + 2]


def test_spans_are_kept_only_when_asked_for() -> None:
    kernel = Kernel(chain("ex2.approx.ftz.f32 %f1, %f1;", 3))
    silent = timed(kernel, ones(), setting=Setting(hbm_bytes=16.0, cold=False))
    assert silent.result.spans == []
    spoken = timed(kernel, ones())
    assert spoken.result.end == silent.result.end
    waits = {(span.name, span.address): span.end - span.start for span in spoken.spans("0") if span.name != ISSUE}
    assert waits == {(cause, address): clocks for (_, address, cause), clocks in silent.result.stalls.items()}


def test_an_unknown_opcode_is_refused() -> None:
    listing = timed(Kernel(chain("ex2.approx.ftz.f32 %f1, %f1;", 2)), ones()).listing
    others = iter(("FROBNICATE.F32", "SYNCS.CCTL.IV"))
    code = tuple(replace(ins, opcode=next(others)) if ins.base == "MUFU" else ins for ins in listing.instructions)
    with pytest.raises(UnknownTimeError, match=r"does not know FROBNICATE\.F32, SYNCS\.CCTL\.IV$"):
        time_listing(replace(listing, instructions=code), H100)


def test_a_listing_without_control_codes_is_refused() -> None:
    listing = timed(Kernel(chain("ex2.approx.ftz.f32 %f1, %f1;", 2)), ones()).listing
    code = tuple(replace(ins, control=replace(ins.control, stall=0)) for ins in listing.instructions)
    with pytest.raises(UnknownTimeError, match="no control codes"):
        time_listing(replace(listing, instructions=code), H100)
