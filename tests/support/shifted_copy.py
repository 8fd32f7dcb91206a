"""PTX of a small kernel: a copy to shifted places."""

from __future__ import annotations

# target[i + shift] = source[i] + addend for i < count, one block of 32 threads
PTX = """
.version 8.0
.target sm_90a
.address_size 64
.visible .entry shifted_sm90_copy_0(
    .param .u64 p_source, .param .u64 p_target, .param .s64 p_shift, .param .f32 p_addend, .param .u32 p_count
)
.reqntid 32, 1, 1
{
    .reg .pred %p; .reg .b32 %i; .reg .b32 %count; .reg .b64 %from; .reg .b64 %to; .reg .b64 %shift; .reg .b64 %offset;
    .reg .f32 %x; .reg .f32 %addend;
    ld.param.u64 %from, [p_source];
    ld.param.u64 %to, [p_target];
    ld.param.s64 %shift, [p_shift];
    ld.param.f32 %addend, [p_addend];
    ld.param.u32 %count, [p_count];
    griddepcontrol.wait;
    mov.u32 %i, %tid.x;
    setp.ge.u32 %p, %i, %count;
    @%p bra DONE;
    mul.wide.u32 %offset, %i, 4;
    add.s64 %from, %from, %offset;
    shl.b64 %shift, %shift, 2;
    add.s64 %to, %to, %offset;
    add.s64 %to, %to, %shift;
    ld.global.f32 %x, [%from];
    add.f32 %x, %x, %addend;
    st.global.f32 [%to], %x;
DONE:
    ret;
}
"""
