"""Facts that the build reads from PTX, cubins and SASS."""

from __future__ import annotations

from collections import Counter

import pytest

from cute_mla.aot_build.opcode_counts import by_mnemonic, count_matching
from cute_mla.aot_build.ptx import KernelParam, read_ptx
from cute_mla.aot_build.sass import count_opcodes, count_overlap
from cute_mla.simulator.sass.cubin import CubinError, read_cubin
from cute_mla.simulator.sass.disassembler import disassemble
from cute_mla.simulator.sass.listing import read_listing
from tests.aot_build.tma_copy import GOOD
from tests.support.listings import listing_of

PTX = """
.version 9.4
// .entry commented_out()
.visible .entry k(
	.param .align 64 .b8 k_param_0[128],
	.param .u64 .ptr .global .align 16 k_param_1,
	.param .u64 k_param_2,
	.param .f32 k_param_3
)
.reqntid 384, 1, 1
.minnctapersm 1
{
	.reg .b32 %r<4>;
	@!%p1 bra $L__BB0_2; /* mbarrier.init */
	wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%f1, %f2},
		%rd1, %rd2, 1, 1;
$L__BB0_2: bar.sync 1, 128;
	{ .reg .pred P1; LAB_WAIT:
	mbarrier.try_wait.parity.shared.b64 P1, [%r1], 0;
	@P1 bra.uni DONE; DONE: }
	cp.async.bulk.tensor.3d.shared::cta.global [%r1], [%rd1, {%r1, %r2, %r3}], [%r4];
	ret;
}
"""


def test_ptx_entry_parameters_and_block() -> None:
    info = read_ptx(PTX)
    assert info.entries == ("k",)
    assert info.block == (384, 1, 1)
    assert info.params == (
        KernelParam("k_param_0", ".b8", 128, 64, pointer=False),
        KernelParam("k_param_1", ".u64", 8, 8, pointer=True),
        KernelParam("k_param_2", ".u64", 8, 8, pointer=False),
        KernelParam("k_param_3", ".f32", 4, 4, pointer=False),
    )


def test_ptx_opcodes_behind_labels_predicates_and_braces_but_not_in_comments() -> None:
    opcodes = read_ptx(PTX).opcodes
    assert opcodes == {
        "bra": 1,
        "bra.uni": 1,
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16": 1,
        "bar.sync": 1,
        "mbarrier.try_wait.parity.shared.b64": 1,
        "cp.async.bulk.tensor.3d.shared::cta.global": 1,
        "ret": 1,
    }


@pytest.mark.parametrize(
    ("body", "found"),
    [
        ("mul.f32 %f1, %f2, %f3; sub.f32 %f4, %f1, %f5;", ("sub.f32 %f4, %f1, %f5;",)),
        ("@%p1 mul.ftz.f32 %f1, %f2, %f3; @%p2 add.ftz.f32 %f4, %f5, %f1;", ("add.ftz.f32 %f4, %f5, %f1;",)),
        ("mul.f32x2 %rd1, %rd2, %rd3; neg.f32x2 %rd4, %rd1; add.f32x2 %rd5, %rd4, %rd6;", ("add.f32x2 %rd5, %rd4, %rd6;",)),
        ("mul.rn.f32 %f1, %f2, %f3; sub.f32 %f4, %f1, %f5;", ()),
        ("mul.f32 %f1, %f2, %f3; sub.rn.f32 %f4, %f1, %f5;", ()),
        ("mul.f32 %f1, %f2, %f3; sub.f32 %f4, %f2, %f3;", ()),
        ("mul.f32 %f1, %f2, %f3; fma.rn.f32 %f4, %f1, %f2, %f3; add.f32 %f5, %f4, %f3;", ()),
        ("mul.lo.s32 %r1, %r2, %r3; add.s32 %r4, %r1, %r5;", ()),
    ],
)
def test_sums_of_products_whose_rounding_the_ptx_leaves_open(body: str, found: tuple[str, ...]) -> None:
    assert read_ptx(f".visible .entry k() {{ {body} ret; }}").contractible == found


def test_ptx_without_a_required_block() -> None:
    assert read_ptx(PTX.replace(".reqntid 384, 1, 1", "")).block is None
    assert read_ptx(PTX.replace(".reqntid 384, 1, 1", ".reqntid 64")).block == (64, 1, 1)


def test_a_parameter_that_is_not_understood_is_refused() -> None:
    with pytest.raises(ValueError, match=r"cannot read the PTX parameter '\.param \.texref tex'"):
        read_ptx(PTX.replace(".param .f32 k_param_3", ".param .texref tex"))


def test_cubin_figures(cubin: bytes) -> None:
    info = read_cubin(cubin)
    assert info.entries == (f"{GOOD.name}_0",)
    assert info.stack_bytes == 0
    assert 16 <= info.registers <= 64
    assert [size for _, size in info.params] == [128, 8, 4]
    assert (info.tool, info.options) == ("13.4.59", "-O 3 -arch sm_90a")


@pytest.mark.parametrize("keep", [0, 4, 40, 100, 1000, -700])
def test_a_cut_off_cubin_is_refused(cubin: bytes, keep: int) -> None:
    with pytest.raises(CubinError):
        read_cubin(cubin[:keep])


def test_a_file_that_is_no_cubin_is_refused() -> None:
    with pytest.raises(CubinError, match="not a 64-bit ELF file"):
        read_cubin(b"\x50\xed\x55\xba" + bytes(100))


def test_sass_of_a_real_cubin(cubin: bytes) -> None:
    sass = count_opcodes(read_listing(disassemble(cubin)))
    assert sass["UTMALDG.2D"] == 1
    assert by_mnemonic(sass)["LDS"] == 32  # 64 x 64 elements, one by one, over 128 threads
    assert by_mnemonic(sass)["STG"] == 32


def test_overlap_is_what_stands_between_products_and_the_wait_for_all_of_them() -> None:
    listing = listing_of(
        "MUFU.EX2 R1, R2 ;",
        "HGMMA.64x64x16.F32.BF16 R24, gdesc[UR4], R24, gsb0 ;",
        "FADD R1, R2, R3 ;",
        "WARPGROUP.DEPBAR.LE gsb0, 0x1 ;",
        "@!P0 MUFU.EX2 R1, R2 ;",
        ".L_x_1:",
        "QGMMA.64x64x32.F32.E4M3.E4M3 R24, gdesc[UR4], R24, gsb0 ;",
        "MUFU.EX2 R1, R2 ;",
        "WARPGROUP.DEPBAR.LE gsb0, 0x0 ;",
        "MUFU.EX2 R1, R2 ;",
    )
    assert count_overlap(listing) == {"FADD": 1, "WARPGROUP.DEPBAR.LE": 1, "MUFU.EX2": 2}


def test_opcodes_behind_predicates_and_labels() -> None:
    listing = listing_of(".text.k:", "LDC R1, c[0x0][0x28] ;", "@!UP0 SYNCS.EXCH.64 URZ, [UR13], UR4 ;", "@P0 BRA `(.L_x_1) ;", ".L_x_1:")
    assert count_opcodes(listing) == {"LDC": 1, "SYNCS.EXCH.64": 1, "BRA": 1}


def test_counts_by_pattern_and_by_mnemonic() -> None:
    counts = Counter({"BAR.SYNC": 2, "BAR.ARV": 1, "BARX": 5})
    assert count_matching(counts, r"BAR\b") == 3
    assert count_matching(counts, r"BAR\.S", r"BARX") == 7
    assert by_mnemonic(counts) == {"BAR": 3, "BARX": 5}
