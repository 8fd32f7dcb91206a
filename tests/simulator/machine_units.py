"""Small PTX kernels whose machine code is evidence: copies, barriers, clusters, matrices, uniform and packed arithmetic, control flow."""

from __future__ import annotations

from tests.simulator.machine_opcodes import Evidence, floating, gathered, predicate, wide

_MODES = ("and", "or", "xor")

_COMPARISONS = [
    *(
        predicate(f"setp.gt.s32 %p2, %r3, %r4; setp.{c}.{mode}.{t} %p1, %r1, %r2, {other};")
        for c, t in (("lt", "s32"), ("le", "s32"), ("gt", "s32"), ("ge", "s32"), ("eq", "u32"), ("ne", "u32"), ("lt", "u32"), ("le", "u32"))
        for mode in _MODES
        for other in ("%p2", "!%p2")
    ),
    *(
        predicate(f"setp.gt.s32 %p2, %r3, %r4; setp.{c}.{mode}.{t} %p1, %rd4, %rd5, %p2;")
        for c, t in (("ge", "s64"), ("gt", "s64"), ("eq", "u64"), ("lt", "s64"))
        for mode in ("and", "or")
    ),
    predicate("setp.eq.u32 %p2, %r1, 1; setp.lt.s32 %p3, %r1, %r2; or.pred %p4, %p2, %p3; not.pred %p5, %p2; and.pred %p1, %p4, %p5;"),
]

_FLOAT_COMPARISONS = [
    predicate(f"setp.gt.f32 %p2, %f3, %f4; setp.{c}.{mode}.f32 %p1, %f1, %f2, {other};")
    for c in ("eq", "gt", "neu", "lt")
    for mode in ("and", "or")
    for other in ("%p2", "!%p2")
]

_BITS = [f"and.b32 %r50, %r1, {1 << bit}; setp.ne.u32 %p1, %r50, 0; selp.b32 $, %r2, %r3, %p1;" for bit in range(7)]

_SHIFTS = [
    "shr.s32 %r50, %r1, 31; shr.u32 %r50, %r50, 26; add.u32 %r50, %r1, %r50; shr.s32 $, %r50, 6;",
    "div.s32 $, %r1, 64;",
    "div.s32 $, %r1, 7;",
    "div.s32 $, %r1, 2;",
    "shr.s32 %r50, %r1, 10; add.s32 $, %r50, -1;",
    "shr.s32 %r50, %r1, 31; add.s32 $, %r50, -1;",
    "and.b32 %r50, %r2, 31; shl.b32 $, %r1, %r50;",
    *wide("shl.b64 %rd8, %rd4, 3; add.u64 %rd7, %rd8, %rd5;"),
    *wide("cvt.s64.s32 %rd8, %r1; add.u64 %rd7, %rd8, %rd5;"),
    "add.s32 %r50, %r1, 128; min.s32 %r50, %r50, %r2; max.s32 $, %r50, 0;",
]

_SCALARS = """
mov.u32 %r70, %ctaid.x; add.u32 %r70, %r70, 5; ld.param.u32 %r72, [p2]; ld.param.u32 %r73, [p2+4]; ld.param.u64 %rd11, [p2];
mov.b64 %rd12, {%r70, %r72};
"""


def scalar(line: str) -> str:
    """Return a line that sets %r80 from values of the whole CTA, and its sum with the thread's number."""
    return f"{line} add.u32 $, %r80, %r0;"


_UNIFORM = [
    *(scalar(f"{f} %r80, %r72;") for f in ("popc.b32", "not.b32", "neg.s32")),
    *(scalar(f"{f} %r80, %r72, %r73;") for f in ("and.b32", "mul.lo.u32", "min.s32", "sub.u32", "max.u32")),
    *(
        scalar(f"{f} %r80, %r72, {n};")
        for f, n in (
            ("shl.b32", 9),
            ("shr.s32", 3),
            ("shr.u32", 3),
            ("div.s32", 7),
            ("div.u32", 7),
            ("rem.s32", 64),
            ("div.s32", 64),
            ("div.s32", 2),
            ("rem.u32", 24),
        )
    ),
    *(
        scalar(line)
        for line in (
            "prmt.b32 %r80, %r72, %r73, 0x6543;",
            "mad.lo.u32 %r80, %r72, %r70, %r73;",
            "lop3.b32 %r80, %r72, %r70, %r73, 0x1b;",
            "shr.u32 %r81, %r72, 2; xor.b32 %r80, %r81, %r73;",
            "shr.u32 %r81, %r72, 2; max.u32 %r80, %r81, %r70;",
        )
    ),
    *(
        line
        for text in (
            "shl.b64 %rd7, %rd11, 9;",
            "add.u64 %rd7, %rd11, %rd12;",
            "mul.wide.s32 %rd7, %r72, %r73;",
            "mul.wide.u32 %rd7, %r72, %r73;",
            "mad.wide.u32 %rd7, %r72, %r70, %rd11;",
            "mad.wide.s32 %rd7, %r72, %r70, %rd11;",
            "mul.lo.u64 %rd7, %rd11, %rd12;",
            "add.u64 %rd7, %rd11, 77;",
            "cvt.s64.s32 %rd13, %r72; shl.b64 %rd13, %rd13, 2; add.u64 %rd7, %rd13, %rd12;",
        )
        for line in wide(text)
    ),
    *(
        scalar(f"setp.gt.s32 %p2, %r70, %r73; setp.{c}.{mode}.{t} %p1, {a}, %p2; selp.b32 %r80, %r72, %r70, %p1;")
        for kinds, comparisons, a in (
            (("s32", "u32"), ("lt", "gt", "ge"), "%r72, %r73"),
            (("u32",), ("eq", "ne"), "%r72, %r73"),
            (("s64",), ("ge", "gt"), "%rd11, %rd12"),
            (("u64",), ("eq", "ne"), "%rd11, %rd12"),
        )
        for t in kinds
        for c in comparisons
        for mode in ("and", "or")
    ),
    scalar("setp.gt.s32 %p2, %r70, %r73; setp.eq.xor.u32 %p1, %r72, %r73, %p2; selp.b32 %r80, %r72, %r70, %p1;"),
]

_PACKED = [
    *(
        line
        for text in (
            "fma.rn.f32x2 %rd7, %rd4, %rd5, %rd40;",
            "mul.rn.f32x2 %rd7, %rd4, %rd40;",
            "add.rn.f32x2 %rd7, %rd4, %rd5;",
            "mov.b64 %rd8, 0x4020000040200000; fma.rn.f32x2 %rd7, %rd8, %rd4, %rd5;",
            "fma.rn.f32x2 %rd7, %rd40, %rd4, %rd5;",
            "mov.b64 %rd8, {%r72, %r72}; fma.rn.f32x2 %rd7, %rd4, %rd8, %rd40;",
            "mov.b64 %rd8, {%r72, %r72}; mul.f32x2 %rd7, %rd4, %rd8;",
        )
        for line in wide(text)
    ),
    floating("max.f32 %f9, %f1, %f2, %f3;"),
    floating("min.f32 %f9, %f1, %f2, %f3;"),
]

_PACKED_BYTES = [f"mov.b32 {{%h1, %h2}}, %r1; cvt.rn.bf16x2.{kind} $, {half};" for kind in ("e4m3x2", "ue8m0x2") for half in ("%h1", "%h2")]

_BARRIER = """
mov.u32 %r60, smem; setp.ne.u32 %p20, %r0, 0; @%p20 bra MADE; mbarrier.init.shared.b64 [%r60+8192], COUNT;
fence.mbarrier_init.release.cluster; MADE: bar.sync 0;
"""


def barrier(count: int) -> str:
    """Return code that makes an mbarrier behind 8192 bytes of shared memory."""
    return _BARRIER.replace("COUNT", str(count))


def wait(name: str, parity: str, place: str = "%r60+8192") -> str:
    """Return a wait for a phase of that mbarrier."""
    return f"{name}: mbarrier.try_wait.parity.shared.b64 %p21, [{place}], {parity}, 10000000; @!%p21 bra {name};\n"


_COPIES = f"""{barrier(128)}
shl.b32 %r61, %r0, 4; add.u32 %r62, %r60, %r61; mul.wide.u32 %rd7, %r0, 16; add.s64 %rd7, %rd7, %rd0;
cp.async.cg.shared.global [%r62], [%rd7], 16; and.b32 %r63, %r0, 16; cp.async.cg.shared.global [%r62+2048], [%rd7], 16, %r63;
cp.async.commit_group; cp.async.cg.shared.global [%r62+4096], [%rd7], 16; cp.async.commit_group; cp.async.wait_group 1; bar.sync 0;
xor.b32 %r64, %r61, 496; add.u32 %r64, %r64, %r60; ld.shared.v4.u32 {{%r100, %r101, %r102, %r103}}, [%r64];
ld.shared.v4.u32 {{%r104, %r105, %r106, %r107}}, [%r64+2048];
shl.b32 %r65, %r0, 2; add.u32 %r65, %r65, %r60; and.b32 %r66, %r0, 4; cp.async.ca.shared.global [%r65+8704], [%rd7], 4, %r66;
cp.async.cg.shared.global [%r62+6144], [%rd7], 16; cp.async.mbarrier.arrive.noinc.shared.b64 [%r60+8192];
{wait("LANDED", "0")} ld.shared.u32 %r116, [%r65+8704]; ld.shared.v4.u32 {{%r108, %r109, %r110, %r111}}, [%r64+6144];
ld.shared.v4.u32 {{%r112, %r113, %r114, %r115}}, [%r64+4096];
bar.sync 0; xor.b32 %r65, %r61, 1024; cvt.u64.u32 %rd9, %r65; add.s64 %rd9, %rd9, %rd0;
cp.async.cg.shared.global [%r62+6144], [%rd9], 16; cp.async.ca.shared.global.L2::128B [%r62+2048], [%rd9+8], 4;
cp.async.mbarrier.arrive.shared.b64 [%r60+8192]; mbarrier.arrive.shared.b64 %rd8, [%r60+8192];
{wait("COUNTED", "1")} ld.shared.u32 %r116, [%r64+6144]; xor.b32 %r112, %r112, %r116;
ld.shared.u32 %r116, [%r64+2048]; xor.b32 %r113, %r113, %r116;
"""

_SYNCHRONISATION = """
mov.u32 %r60, smem; setp.ne.u32 %p20, %r0, 0; @%p20 bra ZERO; st.shared.v4.u32 [%r60], {9, 0, 0, 0}; ZERO: bar.sync 0;
ld.shared.v4.u32 {%r100, %r101, %r102, %r103}, [%r60];
nanosleep.u32 100; bar.warp.sync -1; fence.acq_rel.cta; fence.acq_rel.gpu; fence.acq_rel.cluster; prefetch.global.L2 [%rd2];
prefetch.global.L1 [%rd2]; prefetch.global.L2::evict_last [%rd2];
setp.lt.u32 %p1, %r0, 64; @%p1 bra FIRST; bar.sync 2, 128; bra BEHIND; FIRST: bar.arrive 2, 128; BEHIND: mov.u32 %r104, 5;
griddepcontrol.launch_dependents;
"""

_ATOMICS = """
mov.u32 %r60, smem; setp.ne.u32 %p20, %r0, 0; @%p20 bra ZERO; st.shared.v4.u32 [%r60], {0x7fffffff, 0, 0, 0}; ZERO: bar.sync 0;
atom.shared.and.b32 %r62, [%r60], %r1; and.b32 %r63, %r2, 0xff; red.shared.or.b32 [%r60+4], %r63; red.shared.xor.b32 [%r60+8], %r3;
bar.sync 0; ld.shared.v4.u32 {%r100, %r101, %r102, %r103}, [%r60];
"""

_MATRICES = """
mov.u32 %r60, smem; shl.b32 %r61, %r0, 4; add.u32 %r62, %r60, %r61; st.shared.v4.u32 [%r62], {%r1, %r2, %r3, %r4}; bar.sync 0;
ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r100, %r101, %r102, %r103}, [%r62];
ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%r104, %r105, %r106, %r107}, [%r62]; bar.sync 0;
stmatrix.sync.aligned.m8n8.x4.shared.b16 [%r62], {%r100, %r105, %r102, %r107}; bar.sync 0;
ld.shared.v4.u32 {%r108, %r109, %r110, %r111}, [%r62]; movmatrix.sync.aligned.m8n8.trans.b16 %r112, %r102;
"""

_STORES = """
mul.wide.u32 %rd7, %r0, 16; add.s64 %rd7, %rd8, %rd7; st.global.v4.u32 [%rd7], {%r1, %r2, %r3, %r4};
mul.wide.u32 %rd7, %r0, 8; add.s64 %rd7, %rd8, %rd7; st.global.v2.u32 [%rd7+2048], {%r3, %r1}; st.global.v2.u32 [%rd7+3072], {0, 0};
mul.wide.u32 %rd7, %r0, 4; add.s64 %rd7, %rd8, %rd7; cvt.u16.u32 %h1, %r2; st.global.u16 [%rd7+4096], %h1; st.global.u16 [%rd7+4098], 7;
st.global.u8 [%rd7+4608], %h1; st.global.u8 [%rd7+4609], 1; st.global.u16 [%rd7+4610], %h1; add.s64 %rd9, %rd2, 512;
mul.wide.u32 %rd7, %r0, 8; add.s64 %rd7, %rd0, %rd7; ld.global.v2.u32 {%r100, %r101}, [%rd7]; mov.u32 %r60, smem;
st.shared.u32 [%r60], 9; bar.sync 0; ld.shared.u32 %r102, [%r60]; mov.u32 %r61, %ctaid.x; add.u32 %r62, %r61, %r0; shl.b32 %r62, %r62, 2;
add.u32 %r62, %r62, %r60; bar.sync 0; st.shared.u32 [%r62], %r1; bar.sync 0; ld.shared.u32 %r103, [%r62+0];
"""

_PHASES = f"""{barrier(128)}
mbarrier.arrive.shared.b64 %rd7, [%r60+8192]; {wait("FIRST", "0")}
shl.b32 %r61, %r0, 4; add.u32 %r62, %r60, %r61; st.shared.v4.u32 [%r62], {{%r1, %r2, %r3, %r4}}; fence.proxy.async.shared::cta; bar.sync 0;
@%p20 bra PLAIN; mbarrier.arrive.expect_tx.shared.b64 %rd8, [%r60+8192], 2048;
add.u32 %r63, %r60, 4096; add.u32 %r64, %r60, 8192;
cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%r63], [%r60], 2048, [%r64]; bra JOINED;
PLAIN: mbarrier.arrive.shared.b64 %rd7, [%r60+8192]; JOINED: {wait("SECOND", "1")}
xor.b32 %r65, %r61, 496; add.u32 %r65, %r65, %r60; ld.shared.v4.u32 {{%r100, %r101, %r102, %r103}}, [%r65+4096];
"""

_WRITTEN = f"""{barrier(1)}
st.global.u32 [%rd6], %r1; fence.proxy.async.global; bar.sync 0;
@%p20 bra ASKED; mbarrier.arrive.expect_tx.shared.b64 %rd8, [%r60+8192], 512; sub.s64 %rd9, %rd6, %rd1;
cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r60], [%rd9], 512, [%r60+8192]; ASKED:
{wait("READ", "0")} xor.b32 %r61, %r0, 37; shl.b32 %r61, %r61, 2; add.u32 %r61, %r61, %r60; ld.shared.u32 %r100, [%r61]; bar.sync 0;
"""

_PEERS = f"""{barrier(256)}
mov.u32 %r61, %cluster_ctarank; xor.b32 %r62, %r61, 1; barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
add.u32 %r63, %r60, 8192; mapa.shared::cluster.u32 %r64, %r63, %r62;
mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r64]; mbarrier.arrive.shared.b64 %rd7, [%r60+8192];
{wait("HERE", "0").replace("try_wait.parity", "try_wait.parity.acquire.cluster")} mov.u32 %r100, %r61;
barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
"""

_SENT = f"""{barrier(129)}
mov.u32 %r61, %cluster_ctarank; xor.b32 %r62, %r61, 1; barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
add.u32 %r63, %r60, 8192; mapa.shared::cluster.u32 %r64, %r63, %r62; shl.b32 %r65, %r0, 2; add.u32 %r66, %r60, %r65;
mapa.shared::cluster.u32 %r67, %r66, %r62; @%p20 bra REMOTE; mbarrier.arrive.expect_tx.shared.b64 %rd7, [%r60+8192], 512; REMOTE:
st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%r67], %r1, [%r64];
mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r64];
{wait("HERE", "0")} ld.shared.u32 %r100, [%r66]; mov.u32 %r101, %r61;
barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
"""

_REGISTERS = """
setmaxnreg.dec.sync.aligned.u32 40; griddepcontrol.wait; add.u32 %r100, %r1, %r2; bar.sync 0; setmaxnreg.inc.sync.aligned.u32 64;
"""

_LEAVING = """
mov.u32 %r100, 0; and.b32 %r50, %r1, 15; add.u32 %r50, %r50, 2;
LOOP: and.b32 %r51, %r2, 3; setp.eq.u32 %p1, %r51, 0; @%p1 bra SKIP;
shr.u32 %r2, %r2, 1; setp.gt.u32 %p2, %r2, 1000000; @%p2 bra OUT; SKIP: add.u32 %r100, %r100, %r2; sub.u32 %r50, %r50, 1;
setp.ne.u32 %p3, %r50, 0; @%p3 bra LOOP; add.u32 %r100, %r100, 7; OUT: bar.warp.sync -1; shfl.sync.bfly.b32 %r101, %r100, 1, 31, -1;
"""

_SCALAR_LOOP = """
mov.u32 %r70, %ctaid.x; ld.param.u32 %r72, [p2]; and.b32 %r72, %r72, 1023; add.u32 %r72, %r72, %r70; shr.s32 %r74, %r72, 31;
shr.u32 %r74, %r74, 26; add.s32 %r74, %r72, %r74; shr.s32 %r74, %r74, 6; add.s32 %r74, %r74, -1;
L: setp.lt.s32 %p1, %r74, 0; @%p1 bra.uni D;
add.u32 %r1, %r1, %r2; sub.s32 %r74, %r74, 1; xor.b32 %r1, %r1, %r74; bra.uni L; D: mov.u32 %r100, %r1;
"""


def _box(name: str, bytes_: int, issue: str) -> str:
    """Return the wait for boxes of a tensor map that `issue` asks for, and the load of two words of the first 1024 bytes."""
    return f"""{barrier(1)} mov.u64 %rd20, {name}; cvta.param.u64 %rd20, %rd20; mov.u32 %r69, %cluster_ctarank;
@%p20 bra ASKED; prefetch.tensormap [%rd20]; mbarrier.arrive.expect_tx.shared.b64 %rd7, [%r60+8192], {bytes_}; ASKED: bar.sync 0;
barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
{issue}
{wait("BROUGHT", "0")} shl.b32 %r61, %r0, 2; and.b32 %r61, %r61, {bytes_ - 1}; add.u32 %r61, %r61, %r60; ld.shared.u32 %r100, [%r61];
barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
"""


_ISSUE = "cp.async.bulk.tensor.{}d.shared::cluster.global.tile.mbarrier::complete_tx::bytes{}"
_BOX = _box(
    "p3",
    256,
    f"""@%p20 bra SENT; cp.async.bulk.prefetch.L2.global [%rd2], 512;
cp.async.bulk.prefetch.tensor.4d.L2.global.tile [%rd20, {{0, 1, 2, -1}}];
{_ISSUE.format(4, "")} [%r60], [%rd20, {{0, 1, 2, -1}}], [%r60+8192]; SENT:""",
)
_LOW_BOX = _box("p4", 128, f"@%p20 bra SENT; {_ISSUE.format(3, '')} [%r60], [%rd20, {{4, 1, 2}}], [%r60+8192]; SENT:")
_PLANE_BOX = _box("p5", 128, f"@%p20 bra SENT; {_ISSUE.format(2, '')} [%r60], [%rd20, {{4, 3}}], [%r60+8192]; SENT:")
_EACH_LANES_BOX = _box(
    "p3",
    512,
    f"""and.b32 %r70, %r1, 3; and.b32 %r72, %r2, 3; setp.gt.u32 %p22, %r0, 1; @%p22 bra SENT;
shl.b32 %r71, %r0, 8; add.u32 %r71, %r60, %r71; {_ISSUE.format(4, "")} [%r71], [%rd20, {{0, %r72, %r70, -1}}], [%r60+8192]; SENT:""",
)
_SHARED_BOX = _box(
    "p3",
    512,
    f"""@%p20 bra SENT; shl.b32 %r71, %r69, 8; add.u32 %r71, %r60, %r71; mov.u16 %h1, 3;
{_ISSUE.format(4, ".multicast::cluster")} [%r71], [%rd20, {{0, 1, %r69, 0}}], [%r60+8192], %h1; SENT:""",
)

_PAIRS_BOX = f"""{barrier(1)} mov.u64 %rd20, p3; cvta.param.u64 %rd20, %rd20; mov.u32 %r69, %cluster_ctarank;
setp.ne.u32 %p22, %r69, 0; or.pred %p23, %p20, %p22; @%p23 bra ASKED; mbarrier.arrive.expect_tx.shared.b64 %rd7, [%r60+8192], 512; ASKED:
barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned; add.u32 %r68, %r60, 8192; and.b32 %r68, %r68, 0xfeffffff;
@%p20 bra SENT; {_ISSUE.format(4, ".cta_group::2")} [%r60], [%rd20, {{0, 1, %r69, 0}}], [%r68]; SENT:
@%p22 bra JOINED; {wait("BROUGHT", "0")} JOINED: barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
shl.b32 %r61, %r0, 2; and.b32 %r61, %r61, 255; add.u32 %r61, %r61, %r60; ld.shared.u32 %r100, [%r61];
"""

_PAIRS_FLAT_BOX = (
    _PAIRS_BOX.replace("mov.u64 %rd20, p3;", "mov.u64 %rd20, p4;")
    .replace("%rd7, [%r60+8192], 512;", "%rd7, [%r60+8192], 256;")
    .replace(_ISSUE.format(4, ".cta_group::2"), _ISSUE.format(3, ".cta_group::2"))
    .replace("{0, 1, %r69, 0}", "{4, 1, %r69}")
    .replace("and.b32 %r61, %r61, 255;", "and.b32 %r61, %r61, 127;")
)

_WORDS = """
mov.u32 %r60, smem; shl.b32 %r61, %r0, 4; add.u32 %r62, %r60, %r61;
cvt.rn.TYPE.f32 %r40, %f1, %f2; cvt.rn.TYPE.f32 %r41, %f3, %f4; cvt.rn.TYPE.f32 %r42, %f2, %f3; cvt.rn.TYPE.f32 %r43, %f4, %f1;
st.shared.v4.u32 [%r62], {%r40, %r41, %r42, %r43}; st.shared.v4.u32 [%r62+2048], {%r43, %r41, %r40, %r42};
st.shared.v4.u32 [%r62+4096], {%r41, %r42, %r43, %r40}; st.shared.v4.u32 [%r62+6144], {%r40, %r43, %r42, %r41};
fence.proxy.async.shared::cta; bar.sync 0;
shr.u32 %r63, %r60, 4; cvt.u64.u32 %rd7, %r63; or.b64 %rd7, %rd7, 0x0000001000080000; add.s64 %rd8, %rd7, 128;
"""
_TAIL = "wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;\n"


def product(
    n: int, k: int, types: str, packed: str, from_registers: bool = False, transposed: bool = False, same: bool = False
) -> tuple[str, int]:
    """Return a kernel of two products on one accumulator, and its result registers.

    packed: type of the words in shared memory. same: whether B begins where A does, where it would else be longer than the memory.
    """
    count = n // 2
    accumulators = ", ".join(f"%r{100 + index}" for index in range(count))
    a = "{%r40, %r41, %r42, %r43}" if from_registers else "%rd7"
    majors = "" if "e4m3" in types else f", {'' if from_registers else '0, '}{int(transposed)}"
    lines = [
        f"wgmma.mma_async.sync.aligned.m64n{n}k{k}.{types} {{{accumulators}}}, {a}, %rd8, {scale}, 1, 1{majors};"
        for scale in ("0", "1", "%p1")
    ]
    words = _WORDS.replace("add.s64 %rd8, %rd7, 128;", "mov.u64 %rd8, %rd7;") if same else _WORDS
    head = words.replace("TYPE", packed).replace("cvt.rn.e4m3x2.f32", "cvt.rn.bf16x2.f32")
    return f"{head}\nsetp.gt.u32 %p1, %r60, 7;\nwgmma.fence.sync.aligned;\n" + "\n".join(lines) + f"\n{_TAIL}", count


def _product(name: str, opcodes: str, *arguments: object, **options: bool) -> Evidence:
    body, count = product(*arguments, **options)  # type: ignore[arg-type]
    return Evidence(name, body, count, opcodes, floats=True, archs=("sm90",))


UNITS = (
    gathered(
        "comparisons",
        _COMPARISONS,
        "ISETP.EQ.U32.OR ISETP.EQ.U32.OR.EX ISETP.GE.OR ISETP.GE.OR.EX ISETP.GT.OR ISETP.GT.OR.EX ISETP.LE.AND "
        "ISETP.LE.U32.AND ISETP.LT.AND ISETP.LT.OR ISETP.LT.U32.OR ISETP.LT.XOR ISETP.NE.U32.OR",
    ),
    gathered("float comparisons", _FLOAT_COMPARISONS, "FSETP.EQ.OR FSETP.GT.OR FSETP.NEU.OR", floats=True),
    gathered("bits", _BITS, "R2P"),
    gathered("shifts", _SHIFTS, "LEA.HI LEA.HI.SX32 LEA.HI.X.SX32 SHF.L.W.U32 VIADDMNMX.RELU"),
    gathered(
        "uniform scalars",
        _UNIFORM,
        "UIADD3.X UIMAD UIMAD.WIDE UIMAD.WIDE.U32 UISETP.EQ.U32.AND UISETP.EQ.U32.OR UISETP.EQ.U32.OR.EX UISETP.GE.AND "
        "UISETP.GE.U32.AND UISETP.GT.AND UISETP.GT.U32.AND UISETP.LT.AND UISETP.LT.OR UISETP.LT.U32.AND UISETP.NE.U32.AND "
        "UISETP.NE.U32.AND.EX UISETP.NE.U32.OR ULEA.HI.X ULOP3.LUT UPOPC UPRMT USEL USHF.L.U32 USHF.L.U64.HI USHF.R.S32.HI USHF.R.U32.HI "
        "IMAD.U32",
        before=_SCALARS,
    ),
    gathered(
        "packed floats",
        _PACKED,
        "FADD2 FFMA2 FMUL2 FMNMX3",
        floats=True,
        archs=("sm100",),
        before="mov.b64 %rd40, {%r3, %r3}; ld.param.u32 %r72, [p2+4];\n",
    ),
    Evidence(
        "copies",
        _COPIES,
        17,
        "ARRIVES.LDGSTSBAR.64.ARVCNT ARRIVES.LDGSTSBAR.64.TRANSCNT SYNCS.ARRIVE.TRANS64.RED.A0T1 DEPBAR.LE "
        "LDGDEPBAR LDGSTS.E.BYPASS.128 LDGSTS.E LDGSTS.E.LTC128B SYNCS.EXCH.64 SYNCS.PHASECHK.TRANS64.TRYWAIT "
        "SYNCS.PHASECHK.TRANS64",
    ),
    Evidence(
        "synchronisation",
        _SYNCHRONISATION,
        5,
        "NANOSLEEP WARPSYNC.ALL MEMBAR.ALL.CTA CCTL.IVALL CCTL.E.PF1 CCTL.E.PF2 CCTL.E.PML2 BAR.ARV CS2R PREEXIT",
    ),
    gathered("packed bytes", _PACKED_BYTES, "F2FP.BF16.E4M3.UNPACK_B F2FP.BF16.E8.UNPACK_B", archs=("sm100",)),
    Evidence("atomics on one word", _ATOMICS, 4, "ATOMS.AND ATOMS.OR ATOMS.XOR REDUX VOTEU.ANY UFLO.U32"),
    Evidence("asynchronous stores", _SENT, 2, "STAS", cluster=2),
    Evidence("matrices", _MATRICES, 13, "LDSM.16.M88.4 LDSM.16.MT88.4 STSM.16.M88.4 MOVM.16.MT88"),
    Evidence("stores", _STORES, 4, "STG.E.128 STG.E.64 STG.E.U16 STG.E.U8 LDG.E.64 STS LDS", extra=10),
    Evidence("phases", _PHASES, 4, "SYNCS.ARRIVE.TRANS64 SYNCS.ARRIVE.TRANS64.A1T0 UBLKCP.S.S FENCE.VIEW.ASYNC.S"),
    Evidence("words written, then copied", _WRITTEN, 1, "FENCE.VIEW.ASYNC.G UBLKCP.S.G"),
    Evidence("peers", _PEERS, 1, "SYNCS.ARRIVE.TRANS64.RED.A1T0 UCGABAR_ARV UCGABAR_WAIT NANOSLEEP.SYNCS", cluster=2),
    Evidence("registers", _REGISTERS, 1, "USETMAXREG.DEALLOC.CTAPOOL USETMAXREG.TRY_ALLOC.CTAPOOL ACQBULK"),
    Evidence("leaving a region", _LEAVING, 2, "BREAK BREAK.RELIABLE BSSY.RELIABLE BSYNC.RELIABLE"),
    Evidence("scalar loop", _SCALAR_LOOP, 1, "ULEA.HI ULEA.HI.SX32 ULDC LDCU"),
    Evidence("box", _BOX, 1, "UTMALDG.4D UTMACCTL.PF UTMAPF.L2.4D UBLKPF.L2"),
    Evidence("box of three dimensions", _LOW_BOX, 1, "UTMALDG.3D"),
    Evidence("box of two dimensions", _PLANE_BOX, 1, "UTMALDG.2D"),
    Evidence("box of each lane", _EACH_LANES_BOX, 1, "BRA.U.ANY R2UR R2UR.BROADCAST"),
    Evidence("boxes of a pair", _PAIRS_BOX, 1, "UTMALDG.4D.2CTA", cluster=2, archs=("sm100",)),
    Evidence("flat boxes of a pair", _PAIRS_FLAT_BOX, 1, "UTMALDG.3D.2CTA", cluster=2, archs=("sm100",)),
    Evidence("box for two CTAs", _SHARED_BOX, 1, "UTMALDG.4D.MULTICAST", cluster=2, archs=("sm90", "sm100")),
    _product("bf16 product", "HGMMA.64x64x16.F32.BF16 WARPGROUP.ARRIVE WARPGROUP.DEPBAR.LE", 64, 16, "f32.bf16.bf16", "bf16x2"),
    _product("f16 product", "HGMMA.64x64x16.F32", 64, 16, "f32.f16.f16", "f16x2", from_registers=True, transposed=True),
    _product("wide bf16 product", "HGMMA.64x128x16.F32.BF16", 128, 16, "f32.bf16.bf16", "bf16x2", transposed=True),
    _product("wide f16 product", "HGMMA.64x128x16.F32", 128, 16, "f32.f16.f16", "f16x2"),
    *(
        _product(f"{kind} product of {n}", f"HGMMA.64x{n}x16.F32{suffix}", n, 16, f"f32.{kind}.{kind}", f"{kind}x2", same=n > 192)
        for n in (80, 96, 192, 256)
        for kind, suffix in (("bf16", ".BF16"), ("f16", ""))
    ),
    _product("e4m3 product", "QGMMA.64x64x32.F32.E4M3.E4M3", 64, 32, "f32.e4m3.e4m3", "e4m3x2", from_registers=True),
    _product("wide e4m3 product", "QGMMA.64x128x32.F32.E4M3.E4M3", 128, 32, "f32.e4m3.e4m3", "e4m3x2"),
    _product("odd e4m3 product", "QGMMA.64x136x32.F32.E4M3.E4M3", 136, 32, "f32.e4m3.e4m3", "e4m3x2"),
)
