"""The gates on what Blackwell adds, over a small kernel that uses it; each test plants one fault."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cute_mla.aot_build.gates import Evidence, GateError, check
from cute_mla.aot_build.ptx import read_ptx
from cute_mla.aot_build.sass import count_opcodes
from cute_mla.aot_build.tools import assemble
from cute_mla.simulator.sass.cubin import read_cubin
from cute_mla.simulator.sass.disassembler import disassemble, find_program
from cute_mla.simulator.sass.listing import read_listing
from cute_mla.spec.arch import SM90, SM100
from tests.support.listings import listing_of
from tests.support.params import pointers

pytestmark = pytest.mark.skipif(find_program("ptxas") is None, reason="needs the ptxas program of the build extra")

PTX = """
.version 8.8
.target sm_100f
.address_size 64
.extern .shared .align 1024 .b8 smem[];
.visible .entry pair(.param .u64 .ptr .global out)
.reqntid 128, 1, 1
{
	.reg .b16 %rs<2>;
	.reg .b32 %r<9>;
	.reg .b64 %rd<5>;
	.reg .pred %p<2>;
	ld.param.b64 %rd1, [out];
	mov.b32 %r1, smem;
	mov.b32 %r8, 512;
	tcgen05.alloc.cta_group::2.sync.aligned.shared::cta.b32 [%r1], %r8;
	tcgen05.relinquish_alloc_permit.cta_group::2.sync.aligned;
	bar.sync 0;
	ld.shared.b32 %r2, [%r1];
	mov.u32 %r3, %tid.x;
	tcgen05.st.sync.aligned.32x32b.x2.b32 [%r2], {%r3, %r3};
	tcgen05.wait::st.sync.aligned;
	tcgen05.fence::before_thread_sync;
	bar.sync 0;
	tcgen05.fence::after_thread_sync;
	mov.b64 %rd2, 0x4000004000010000;
	mov.b64 %rd3, 0x4000004000010100;
	mov.b32 %r5, 0x08200490;
	setp.ne.b32 %p1, %r3, 0;
	@%p1 bra $L__DONE;
	tcgen05.mma.cta_group::2.kind::f16 [%r2], %rd2, %rd3, %r5, 1;
	tcgen05.mma.cta_group::2.kind::f16 [%r2], [%r2+128], %rd3, %r5, 1;
	mov.b16 %rs1, 3;
	tcgen05.commit.cta_group::2.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64 [%r1+64], %rs1;
$L__DONE:
	tcgen05.ld.sync.aligned.32x32b.x2.b32 {%r6, %r7}, [%r2];
	tcgen05.wait::ld.sync.aligned;
	st.global.v2.b32 [%rd1], {%r6, %r7};
	bar.sync 0;
	tcgen05.dealloc.cta_group::2.sync.aligned.b32 %r2, 512;
	ret;
}
"""


def assembled(ptx: str) -> Evidence:
    """Return the gates' evidence for a PTX text, assembled by ptxas."""
    cubin = assemble(ptx, SM100.gpu_arch)
    assert cubin is not None
    info = read_cubin(cubin)
    return Evidence(
        kernel="pair",
        arch=SM100,
        params=pointers("out"),
        block=(128, 1, 1),
        smem_bytes=1024,
        tmem_columns=512,
        expected={"UTCHMMA": 2},
        ptx=read_ptx(ptx),
        cubin=replace(info, options=f"-O 3 -arch {SM100.gpu_arch}"),
        sass=count_opcodes(read_listing(disassemble(cubin))),
        reassembled=info,
    )


@pytest.fixture(scope="module")
def evidence() -> Evidence:
    """Return the gates' evidence for the text above."""
    return assembled(PTX)


def fails(evidence: Evidence, message: str) -> None:
    """Expect the check to fail with this message."""
    with pytest.raises(GateError, match=message):
        check(evidence)


def test_the_kernel_passes(evidence: Evidence) -> None:
    check(evidence)


def test_what_ptxas_adds_is_not_counted(evidence: Evidence) -> None:
    """A wrong deallocation traps in functions that ptxas appends."""
    cubin = assemble(PTX, SM100.gpu_arch)
    assert cubin is not None
    text = disassemble(cubin)
    assert "$__internal_" in text
    assert "BPT.TRAP" in text
    assert "BPT.TRAP" not in evidence.sass
    assert evidence.cubin.entries == ("pair",)


def test_a_kernel_behind_a_helper_is_counted() -> None:
    listing = listing_of("$__internal_0_$trap:", "BPT.TRAP 0x1 ;", ".L_x_1:", "NOP ;", "kernel:", ".text.kernel:", "EXIT ;")
    assert count_opcodes(listing) == {"EXIT": 1}


@pytest.mark.parametrize(
    ("alloc", "columns"),
    [("512", 512), ("%r8", 512)],
)
def test_columns_are_read_from_an_immediate_or_its_register(alloc: str, columns: int) -> None:
    assert read_ptx(PTX.replace("[%r1], %r8", f"[%r1], {alloc}")).tmem_columns == (columns,)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("mov.b32 %r8, 512;", "mov.b32 %r8, 512;\n\tadd.s32 %r8, %r8, 32;"),
        ("mov.b32 %r8, 512;", "mov.b32 %r8, 512;\n\tmov.b32 %r8, 256;"),
        ("mov.b32 %r8, 512;", "mov.b32 %r8, %r1;"),
    ],
)
def test_columns_that_are_computed(evidence: Evidence, before: str, after: str) -> None:
    ptx = read_ptx(PTX.replace(before, after))
    assert ptx.tmem_columns == (None,)
    fails(replace(evidence, ptx=ptx), "gate tensor_memory: a tcgen05.alloc of a number of columns that is computed, limit: an immediate")


def test_columns_that_are_not_those_declared(evidence: Evidence) -> None:
    for declared in (256, 0):
        message = f"gate tensor_memory: 512 columns of tensor memory allocated in the PTX, limit: the {declared} declared"
        fails(replace(evidence, tmem_columns=declared), message)


def test_columns_that_are_declared_and_never_allocated(evidence: Evidence) -> None:
    bare = replace(evidence, ptx=replace(evidence.ptx, tmem_columns=()))
    fails(bare, "gate tensor_memory: 0 columns of tensor memory allocated in the PTX, limit: the 512 declared")


def test_more_columns_than_there_are(evidence: Evidence) -> None:
    twice = replace(evidence, tmem_columns=1024, ptx=replace(evidence.ptx, tmem_columns=(512, 512)))
    fails(twice, "gate tensor_memory: 1024 columns of tensor memory, limit: 512 on sm100")
    fails(replace(evidence, arch=SM90), "gate tensor_memory: 512 columns of tensor memory, limit: 0 on sm90")


def test_columns_that_are_never_given_back(evidence: Evidence) -> None:
    kept = assembled(PTX.replace("tcgen05.dealloc.cta_group::2.sync.aligned.b32 %r2, 512;", ""))
    fails(kept, "gate tensor_memory: 0 tcgen05.dealloc, limit: at least the 1 allocations")
    check(evidence)


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("tcgen05.mma.cta_group::2.kind::f16 [%r2], [%r2+128], %rd3, %r5, 1;", "", "gate expected_counts: 1 UTCHMMA, limit"),
        (".multicast::cluster.b64 [%r1+64], %rs1", ".b64 [%r1+64]", "0 tensor-core commits to several CTAs in the SASS"),
        ("tcgen05.wait::st.sync.aligned;", "", "0 waits for tensor-memory stores in the SASS, limit: at least the 1 of the PTX"),
        ("tcgen05.st.sync.aligned.32x32b.x2.b32 [%r2], {%r3, %r3};", "", "0 tensor-memory stores in the SASS, limit: at least the 1 "),
    ],
)
def test_a_cubin_of_another_text(evidence: Evidence, before: str, after: str, message: str) -> None:
    """The PTX is the good one; the cubin, and all that is read from it, is of a text without one of its instructions."""
    assert PTX.count(before) == 1
    other = assembled(PTX.replace(before, after))
    fails(replace(other, ptx=evidence.ptx), message)


def test_reassembly(evidence: Evidence) -> None:
    other = assembled(PTX.replace("0x4000004000010100", "0x4000004000010200"))
    fails(replace(evidence, reassembled=other.cubin), r"gate reassembly: sections \['\.text\.pair'")
