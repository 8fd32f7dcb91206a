"""Values that stay in registers."""

from __future__ import annotations

from cutlass import Int32, cute


def kept(value: Int32) -> Int32:
    """The same value, worked out here and kept. What a thread's number alone decides would else be worked out again at every use,
    in every turn of a loop."""
    return cute.arch.inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[Int32(value)])
