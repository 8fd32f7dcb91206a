"""cache_write: writes keys to their slots in a paged cache, quantised where the cache is. Every architecture.

    grid      (ceil(tokens / 4), 1, 1), 128 threads, no shared memory; one warp writes one key
    a key     as in primitives/rows.py: all of it is loaded before anything is worked out
    a group   (128 columns of fp8_656 and nope_528, 64 of fp8_584, 32 of v41) lies in 16, 8 or 4 neighbouring lanes: a butterfly of
              shuffles gives each of them the largest magnitude, as bits, so that what is not finite comes out on top; each works out the
              scale, one of them writes it
    v41       one variant serves both orders, scales after each row or after all rows of a page: the stride of a row decides
    division  by the caller's scale with div.rn, which is the reference's. By a group's scale it is worked out from one reciprocal, with the
              same codes (primitives/arithmetic.py); by a power of two it is a product with its reciprocal, exact as well

The trick is what is not done: a slot outside the cache ends its warp before a column is read. Operands and their meaning:
cute_mla/spec/cache_write.py.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint8, Uint16

from ...spec.arch import Arch
from ...spec.cache_format import CacheFormat
from ...spec.cache_rows import (
    ANY_16_BITS,
    KEYS_PER_BLOCK,
    VECTOR,
    CacheRowsConfig,
)
from ...spec.cache_write import CacheWriteArguments
from ...spec.mla import ELEMENT_BYTES
from ..attention.kernel import ELEMENT_TYPES
from ..definition import KernelDefinition
from ..primitives.arithmetic import registers
from ..primitives.rows import PAIR, SPAN, WORDS, Key, KeyWriter, is_whole, load_elements, load_integer, load_or_one, vectors_of
from ..warp_kernel import WarpKernel, WarpLaunch

THREADS = 32 * KEYS_PER_BLOCK


class CacheWrite(WarpKernel):
    """One variant of the kernel."""

    launch = WarpLaunch("cache_write", "write", CacheWriteArguments, THREADS)

    def __init__(self, config: CacheRowsConfig, arch: Arch) -> None:
        super().__init__(config, arch)
        self.cache: CacheFormat = config.format
        self.vectors = vectors_of(config.format)
        self.writer = KeyWriter(config.format, Uint16 if config.dtype == ANY_16_BITS else ELEMENT_TYPES[config.dtype])

    @cute.kernel
    def kernel(self, args: CacheWriteArguments):
        """Process one key or row per warp."""
        block, _, _ = cute.arch.block_idx()
        thread, _, _ = cute.arch.thread_idx()
        token, lane = block * KEYS_PER_BLOCK + thread // 32, thread % 32

        # The next kernel may be launched now: one that reads the cache waits for this grid to end.
        cute.arch.griddepcontrol_launch_dependents()
        cute.arch.griddepcontrol_wait()

        slot = Int64(-1)
        if token < args.tokens:
            slot = load_integer(args.slot_mapping, token * args.slot_stride_token, args.wide_slots)
        if slot >= 0 and slot < args.slots:
            page, row = Int32(slot) // args.page_size, Int32(slot) % args.page_size
            key = Key.of(self.cache, args.k_cache.toint() + page * args.cache_stride_page, row, args.cache_stride_row, args.page_size)

            latent = args.kv_c.toint() + token * args.kv_c_stride_token * ELEMENT_BYTES
            rotary = args.k_pe.toint() + token * args.k_pe_stride_token * ELEMENT_BYTES
            vectors = [registers(WORDS) for _ in range(self.vectors)]
            pair = registers(1)
            for i in cutlass.range_constexpr(self.vectors):
                column = SPAN * i + VECTOR * lane
                load_elements(vectors[i], latent + column * ELEMENT_BYTES, is_whole(latent, VECTOR), column < self.writer.latent)
            if cutlass.const_expr(self.writer.rotary):
                load_elements(pair, rotary + PAIR * lane * ELEMENT_BYTES, is_whole(rotary, PAIR), Boolean(True))

            scale = load_or_one(args.descale_k) if cutlass.const_expr(self.writer.is_flat) else Float32(1.0)
            for i in cutlass.range_constexpr(self.vectors):
                self.writer.write_vector(key, vectors[i], i, lane, scale, args.power_of_two)
            if cutlass.const_expr(self.writer.rotary):
                self.writer.write_pair(key, pair, lane, scale)


def expected(cache: CacheFormat) -> dict[str, int]:
    """Return the instructions of a lane.

    Its vectors are loaded at once. Columns are divided and rounded as the reference does; ptxas would take div.full as well.
    """
    vectors = vectors_of(cache)
    if not cache.quantised:
        return {"LDG.E.128": vectors, "STG.E.128": vectors}
    rotary = 0 if cache.groups else PAIR
    divided = 0 if cache.groups else vectors * VECTOR + rotary  # by the caller's scale, which may be any number
    scales = vectors if cache.groups and cache.scale == "fp32" else 0
    return {
        "LDG.E.128": vectors,
        "div.rn.f32": divided + scales,
        "rcp.rn.f32": scales,
        "cvt.rn.satfinite.e4m3x2.f32": (vectors * VECTOR + rotary) // 2,
    }


def build(config: CacheRowsConfig, arch: Arch) -> KernelDefinition:
    """Return the variant, ready to compile."""
    kernel = CacheWrite(config, arch)
    return kernel.definition({"kv_c": Uint16, "k_pe": Uint16, "descale_k": Float32, "k_cache": Uint8}, expected(config.format))
