"""cache_gather: keys of several requests out of a paged cache, one after the other, dequantised. Every architecture.

    grid      (ceil(rows / 4), 1, 1), 128 threads, no shared memory; one warp gathers one row of out
    a row     its request is the number of those that end at or before it: lanes look at 32 ends at once, and a vote counts them
    a key     as in primitives/rows.py: all of it, and its scales, are on their way before the first column is worked out

A column times its scale is rounded once, to the type of out. A key that no page holds (a page number outside the cache, a position
beyond the block table) is a row of zeros, and nothing is read for it. Operands and their meaning: cute_mla/spec/cache_gather.py.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float8E4M3FN, Float32, Int32, Int64, Uint8, Uint16

from ...spec.arch import Arch
from ...spec.cache_format import CacheFormat
from ...spec.cache_gather import CacheGatherArguments
from ...spec.cache_rows import ANY_16_BITS, KEYS_PER_BLOCK, VECTOR, CacheRowsConfig, latent_columns, rotary_columns
from ...spec.mla import ELEMENT_BYTES
from ..attention.kernel import ELEMENT_TYPES
from ..definition import KernelDefinition
from ..primitives.arithmetic import as_float, e8m0_scale, pack_word, registers
from ..primitives.rows import PAIR, SPAN, WORDS, Key, element_at, exact, is_whole, load_or_one, load_words, store_elements, vectors_of
from ..warp_kernel import WarpKernel, WarpLaunch

THREADS = 32 * KEYS_PER_BLOCK
NEVER = (1 << 31) - 1  # where a request that does not exist ends


@cute.jit
def requests_before(cu_seqlens: cute.Pointer, batch: Int32, row: Int32) -> Int32:
    """Return the number of requests that end at or before a row of out."""
    lane, base, count = cute.arch.lane_idx(), Int32(0), Int32(0)
    while base < batch:
        end = Int32(NEVER)
        if base + lane < batch:
            end = cu_seqlens[base + lane + 1]
        ended = cute.arch.popc(cute.arch.vote_ballot_sync(end <= row))
        count += ended
        base = cutlass.select_(ended == 32, base + 32, batch)
    return count


@cute.jit
def position_of(cu_seqlens: cute.Pointer, starts: cute.Pointer, request: Int32, row: Int32) -> Int32:
    """Return the position in its request of a row's key; negative if there is none."""
    first = cu_seqlens[request]
    position = row - first
    if starts.toint() != 0 and row >= first:
        start = starts[request]
        position = cutlass.select_(start >= 0, position + start, start)
    return position


@cute.jit
def page_of(table: cute.Pointer, place: Int64, column: Int32, columns: Int32, wanted: Boolean) -> Int32:
    """Return a request's page; -1 where its row of the block table has none."""
    page = Int32(-1)
    if wanted and column < columns:
        page = (table + (place + column)).load()
    return page


@cute.jit
def load_scale(element: cutlass.Constexpr, address: Int64, wanted: Boolean) -> Int32:
    """Load one scale; 0, and no access, where it is not wanted."""
    bits = Int32(0)
    if wanted:
        bits = Int32(element_at(element, address).load())
    return bits


def scaled(words: cute.Tensor, scale: Float32) -> list[Float32]:
    """Return e4m3 values times their scale."""
    return [value * scale for value in exact(words, Float8E4M3FN)]


class CacheGather(WarpKernel):
    """One variant of the kernel."""

    launch = WarpLaunch("cache_gather", "gather", CacheGatherArguments, THREADS)

    def __init__(self, config: CacheRowsConfig, arch: Arch) -> None:
        super().__init__(config, arch)
        self.cache: CacheFormat = config.format
        self.dtype = Uint16 if config.dtype == ANY_16_BITS else ELEMENT_TYPES[config.dtype]
        self.latent = latent_columns(config.format)
        self.rotary = rotary_columns(config.format)
        self.is_flat = bool(self.cache.quantised) and not self.cache.groups  # one scale for the whole cache

    @cute.kernel
    def kernel(self, args: CacheGatherArguments):
        """Process one key or row per warp."""
        block, _, _ = cute.arch.block_idx()
        thread, _, _ = cute.arch.thread_idx()
        row, lane = block * KEYS_PER_BLOCK + thread // 32, thread % 32

        # The next kernel may be launched now: one that reads out waits for this grid to end.
        cute.arch.griddepcontrol_launch_dependents()
        cute.arch.griddepcontrol_wait()

        request = args.batch
        if row < args.rows:
            request = requests_before(args.cu_seqlens, args.batch, row)
        if request < args.batch:
            position = position_of(args.cu_seqlens, args.starts, request, row)
            page = page_of(args.block_table, request * args.table_stride_batch, position // args.page_size, args.table_pages, position >= 0)
            found = (page >= 0) & (page < args.pages)
            address = args.k_cache.toint() + page * args.cache_stride_page
            key = Key.of(self.cache, address, position % args.page_size, args.cache_stride_row, args.page_size)
            self.gather(key, args.out.toint() + row * args.out_stride_row * ELEMENT_BYTES, lane, found, args.descale_k)

    def gather(self, key: Key, target: Int64, lane: Int32, found: Boolean, descale_k: cute.Pointer) -> None:
        """Gather one key to one row of out."""
        element_bytes = 1 if self.cache.quantised else ELEMENT_BYTES
        count = vectors_of(self.cache)
        vectors = [registers(VECTOR * element_bytes // 4) for _ in range(count)]
        columns = [SPAN * i + VECTOR * lane for i in range(count)]
        for words, column in zip(vectors, columns, strict=True):
            load_words(words, key.data + column * element_bytes, found & (column < self.latent))
        pair = self.load_pair(key.data, lane, found) if self.rotary else None
        factors = [self.scale(key.scales, column, found, descale_k) for column in columns]

        whole = is_whole(target, VECTOR)
        for words, column, factor in zip(vectors, columns, factors, strict=True):
            halves = words
            if self.cache.quantised:
                values, halves = scaled(words, factor), registers(WORDS)
                for i in range(WORDS):
                    halves[i] = pack_word(values[2 * i : 2 * i + 2], self.dtype)
            store_elements(halves, target + column * ELEMENT_BYTES, whole, column < self.latent)
        if pair is not None:
            self.store_pair(pair, target + (self.latent + PAIR * lane) * ELEMENT_BYTES, factors[0])

    def load_pair(self, data: Int64, lane: Int32, found: Boolean) -> cute.Tensor:
        """Load the lane's 2 rotary columns, not converted."""
        pair = registers(1)
        if self.is_flat:
            pair[0] = load_scale(Uint16, data + self.latent + PAIR * lane, found)
        else:
            wide = self.cache.wide_offset + (0 if self.cache.quantised else self.latent * ELEMENT_BYTES)
            load_words(pair, data + wide + PAIR * lane * ELEMENT_BYTES, found)
        return pair

    def store_pair(self, pair: cute.Tensor, target: Int64, factor: Float32) -> None:
        """Store the lane's 2 rotary columns in the type of out."""
        if self.is_flat:
            pair[0] = pack_word(scaled(pair, factor)[:PAIR], self.dtype)
        elif self.cache.quantised and self.dtype is not cutlass.BFloat16:
            pair[0] = pack_word(exact(pair, cutlass.BFloat16), self.dtype)
        store_elements(pair, target, is_whole(target, PAIR), Boolean(True))

    def scale(self, scales: Int64, column: Int32, found: Boolean, descale_k: cute.Pointer) -> Float32:
        """Return the scale of a lane's 8 columns."""
        if not self.cache.quantised:
            return Float32(1.0)
        if not self.cache.groups:
            return load_or_one(descale_k)
        wanted, group = found & (column < self.latent), column // self.cache.group
        if self.cache.scale == "fp32":
            return as_float(load_scale(Int32, scales + group * 4, wanted))
        code = load_scale(Uint8, scales + group, wanted)
        return e8m0_scale(code)


def build(config: CacheRowsConfig, arch: Arch) -> KernelDefinition:
    """Return the variant, ready to compile."""
    kernel = CacheGather(config, arch)
    # a lane's vectors
    return kernel.definition(
        {"k_cache": Uint8, "descale_k": Float32, "out": Uint16},
        {
            "LDG.E.64" if config.format.quantised else "LDG.E.128": vectors_of(config.format),
            "STG.E.128": vectors_of(config.format),
        },
    )
