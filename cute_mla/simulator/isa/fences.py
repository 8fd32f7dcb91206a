"""Fences, prefetches and cache policies."""

from __future__ import annotations

import re

from ..checks import order, phases
from ..frontend.ptx import Instruction
from ..state.window import Window
from .emitter import Emitter
from .memory_ops import SCOPE
from .table import ignored, op, runtime

Match = re.Match[str]


@op(
    r"fence.proxy.async(.(global|shared::cta|shared::cluster))?",
    rf"fence(.(sc|acq_rel))?{SCOPE}",
    r"fence.mbarrier_init.release.cluster",
    r"membar.(cta|gl|sys)",
    writes=(), pure=False,
)  # fmt: skip
def fence(e: Emitter, ins: Instruction, m: Match) -> None:
    """Emit a fence. Between warps it orders nothing by itself: atomic operations and strong accesses hand over everything anyway."""
    if ins.opcode.startswith("fence.proxy") and not ins.opcode.endswith("global"):
        e.line("order_proxies(w)")
    if not ins.opcode.endswith((".global", ".cta")):
        e.line("order_barriers(w)")
    e.line(f"if w.observer is not None: w.observer.fence(w, {ins.opcode!r})")


ignored(r"prefetch.(tensormap|param.tensormap|const.tensormap)", "a hint: no effect on results")
ignored(r"prefetch.global.(L1|L2|L2::evict_last|L2::evict_normal)", "a hint: no effect on results")


@op(r"createpolicy.fractional.L2::(evict_last|evict_normal|evict_first|evict_unchanged)(.L2::(evict_first|evict_unchanged))?.b64")
def create_policy(e: Emitter, ins: Instruction, m: Match) -> None:
    """Emit a cache policy: any value, since policies have no effect on results."""
    e.line(f"{e.dst(ins.operands[0], 'b64')}.fill(0)")


@runtime
def order_proxies(w: Window) -> None:
    """Execute fence.proxy.async."""
    order.fence(w.cta, w.warps)


@runtime
def order_memory(w: Window) -> None:
    """Exchange knowledge through memory: an atomic operation, or a strong load or store."""
    order.through_memory(w)


@runtime
def order_barriers(w: Window) -> None:
    """Record a fence after mbarrier.init."""
    phases.note_fence(w.cta, w.warps)
