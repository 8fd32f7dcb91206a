"""cache_insert: normalises, rotates, quantises and writes keys to a paged cache, and rotates queries in place. Every architecture.

    grid      (ceil(tokens / 4) + ceil(tokens * ceil(heads / 16) / 4), 1, 1), 128 threads, no shared memory. CTAs in front take keys, a
              warp each; those after the rotary columns of queries, a warp 16 heads of a token: 4 times 4 of them, 8 lanes each
    a key     as in primitives/rows.py, all of it loaded first. Where values are rotated (fp8_584, v41), lanes 24 to 31 have the rotary
              columns as the end of the second vector, wherever they come from
    norm      a sum of squares over neighbouring columns, by a butterfly; rounded to the keys' type, as is the rotation after it
    write     that of cache_write (primitives/rows.py), from the rounded columns

The trick is that nothing else is done: every step rounds as the part that stands alone does, so the bits are those of the parts one after
the other (ops/norm_rope.py, then cache_write). Operands and their meaning: cute_mla/spec/cache_insert.py.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint8, Uint16

from ...spec.arch import Arch
from ...spec.cache_format import CacheFormat
from ...spec.cache_insert import (
    HEADS,
    HEADS_AT_ONCE,
    LANES,
    PASSES,
    THREADS,
    WARPS,
    CacheInsertArguments,
    normalised_columns,
    rotates,
    rotates_values,
)
from ...spec.cache_rows import KEYS_PER_BLOCK, VECTOR, CacheRowsConfig
from ...spec.mla import D_ROPE, ELEMENT_BYTES
from ..attention.kernel import ELEMENT_TYPES
from ..definition import KernelDefinition
from ..primitives.arithmetic import lane_sum, neighbour_sum, pack_pair, product, registers, square_root
from ..primitives.rows import (
    FLOAT_BYTES,
    PAIR,
    SPAN,
    WORDS,
    Key,
    KeyWriter,
    Loaded,
    exact,
    is_whole,
    load_elements,
    load_floats,
    load_or_one,
    load_together,
    start_load,
    store_elements,
)
from ..warp_kernel import WarpKernel, WarpLaunch

PAIRS = D_ROPE // 2
ROTARY_LANE = (SPAN - D_ROPE) // VECTOR  # first lane that has rotary columns in its second vector, where values are rotated


def turned(words: cute.Tensor, cosines: cute.Tensor, sines: cute.Tensor, dtype: type[cutlass.Numeric]) -> list[Int32]:
    """Rotate pairs of 16-bit elements, a word each; each rounded once."""
    values = exact(words, dtype)
    rotated = []
    for i in range(cute.size(words)):
        even, odd = values[2 * i], values[2 * i + 1]
        first = product(even, cosines[i]) - product(odd, sines[i])
        second = product(odd, cosines[i]) + product(even, sines[i])
        rotated.append(pack_pair(first, second, dtype))
    return rotated


def one_word(word: Int32) -> Int32:
    """Return a pair of elements, rounded together: where only halves of it are used, ptxas makes F2F on sm90, which the model lacks."""
    return cute.arch.inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[word])


class CacheInsert(WarpKernel):
    """One variant of the kernel."""

    launch = WarpLaunch("cache_insert", "insert", CacheInsertArguments, THREADS)

    def __init__(self, config: CacheRowsConfig, arch: Arch) -> None:
        super().__init__(config, arch)
        self.cache: CacheFormat = config.format
        self.dtype = ELEMENT_TYPES[config.dtype]
        self.writer = KeyWriter(config.format, self.dtype)
        self.normalised = normalised_columns(config.format)
        self.vectors = self.normalised // SPAN
        self.rotates = rotates(config.format)
        self.rotates_values = rotates_values(config.format)
        self.has_pair = self.writer.rotary and not self.rotates_values  # rotary columns lie apart from the normalised ones

    @cute.kernel
    def kernel(self, args: CacheInsertArguments):
        """Process one key per warp, or the queries of a token."""
        block, _, _ = cute.arch.block_idx()
        thread, _, _ = cute.arch.thread_idx()

        # The next kernel may be launched now: one that reads the results waits for this grid to end.
        cute.arch.griddepcontrol_launch_dependents()
        cute.arch.griddepcontrol_wait()

        if block < args.key_blocks:
            self.insert_key(args, block * KEYS_PER_BLOCK + thread // 32, thread % 32)
        elif cutlass.const_expr(self.rotates):
            self.rotate_queries(args, (block - args.key_blocks) * WARPS + thread // 32, thread % 32)

    @cute.jit
    def insert_key(self, args: CacheInsertArguments, token: Int32, lane: Int32):
        """Process the key of a token: all lanes of a warp.

        Slot, position, columns and weights are asked for together. Codes of columns that are not rotated are made while angles come.
        """
        if token < args.tokens:
            slot_load = start_load(args.slot_mapping, token * args.slot_stride_token, args.wide_slots)
            vectors = [registers(WORDS) for _ in range(self.vectors)]
            pair = registers(1)
            weights = [registers(WORDS) for _ in range(self.vectors)]
            cosines = cute.make_rmem_tensor(WORDS if self.rotates_values else 1, Float32)
            sines = cute.make_rmem_tensor(WORDS if self.rotates_values else 1, Float32)
            position = self.position_of(args, token) if cutlass.const_expr(self.rotates) else None
            self.load_key(args, vectors, pair, weights, token, lane)
            cute.arch.sync_warp()  # else angles, which wait for the position, are asked for ahead of the columns
            if cutlass.const_expr(self.rotates):
                self.load_angles(args, cosines, sines, position.value(), lane)
            self.normalise(args, vectors, weights)
            if cutlass.const_expr(self.rotates_values):
                self.rotate_values(vectors[-1], cosines, sines, lane)
            slot, kept = slot_load.value(), args.keys.toint() != 0
            written = slot >= 0 and slot < args.slots
            scale = load_or_one(args.descale_k) if cutlass.const_expr(self.writer.is_flat) else Float32(1.0)
            page, row = Int32(slot) // args.page_size, Int32(slot) % args.page_size
            address = args.k_cache.toint() + page * args.cache_stride_page
            key = Key.of(self.cache, address, row, args.cache_stride_row, args.page_size)
            target = args.keys.toint() + token * args.keys_stride_token * ELEMENT_BYTES
            if kept:
                for i in cutlass.range_constexpr(self.vectors):
                    column = SPAN * i + VECTOR * lane
                    store_elements(vectors[i], target + column * ELEMENT_BYTES, is_whole(target, VECTOR), Boolean(True))
            if written:
                for i in cutlass.range_constexpr(self.vectors):
                    self.writer.write_vector(key, vectors[i], i, lane, scale, args.power_of_two)
            if cutlass.const_expr(self.has_pair):
                pair[0] = turned(pair, cosines, sines, self.dtype)[0]
                if kept:
                    column = self.normalised + PAIR * lane
                    store_elements(pair, target + column * ELEMENT_BYTES, is_whole(target, PAIR), Boolean(True))
            elif cutlass.const_expr(self.writer.rotary):
                self.spread(vectors[-1], pair, lane)
            if cutlass.const_expr(self.writer.rotary):
                self.write_pair(key, pair, lane, scale, written)

    @cute.jit
    def write_pair(self, key: cutlass.Constexpr, pair: cute.Tensor, lane: Int32, scale: Float32, written: Boolean):
        """Write the two rotary columns of a lane, if wanted."""
        if written:
            self.writer.write_pair(key, pair, lane, scale)

    def load_key(
        self,
        args: CacheInsertArguments,
        vectors: list[cute.Tensor],
        pair: cute.Tensor,
        weights: list[cute.Tensor],
        token: Int32,
        lane: Int32,
    ):
        """Load all columns of a key, and the norm's weights of a lane's columns."""
        latent = args.kv_c.toint() + token * args.kv_c_stride_token * ELEMENT_BYTES
        rotary = args.k_pe.toint() + token * args.k_pe_stride_token * ELEMENT_BYTES
        first = args.norm_weight.toint()
        targets, addresses, whole = [*weights], [], is_whole(latent, VECTOR) & is_whole(first, VECTOR)
        for i in range(self.vectors):
            addresses.append(first + (SPAN * i + VECTOR * lane) * ELEMENT_BYTES)
        for i in range(self.vectors):
            address = latent + (SPAN * i + VECTOR * lane) * ELEMENT_BYTES
            if self.rotates_values and self.writer.rotary > 0 and i == self.vectors - 1:
                address = cutlass.select_(lane >= ROTARY_LANE, rotary + (lane - ROTARY_LANE) * VECTOR * ELEMENT_BYTES, address)
                whole = whole & is_whole(rotary, VECTOR)
            targets.append(vectors[i])
            addresses.append(address)
        if self.has_pair:
            targets.append(pair)
            addresses.append(rotary + PAIR * lane * ELEMENT_BYTES)
            whole = whole & is_whole(rotary, PAIR)
        load_together(targets, addresses, whole)

    @cute.jit
    def load_angles(self, args: CacheInsertArguments, cosines: cute.Tensor, sines: cute.Tensor, position: Int64, lane: Int32):
        """Load the cosines and sines of a lane's pairs; NaN for a position outside the table."""
        angles, wanted = self.angles_at(args, position)
        first = angles + lane * FLOAT_BYTES
        if cutlass.const_expr(self.rotates_values):
            first = angles + (lane - ROTARY_LANE) * WORDS * FLOAT_BYTES
            wanted = wanted & (lane >= ROTARY_LANE)
        load_floats(cosines, first, wanted)
        load_floats(sines, first + PAIRS * FLOAT_BYTES, wanted)

    @cute.jit
    def normalise(self, args: CacheInsertArguments, vectors: cutlass.Constexpr, weights: cutlass.Constexpr):
        """Apply RMSNorm, rounded once to the keys' type."""
        columns = [exact(words, self.dtype) for words in vectors]
        squares = neighbour_sum([lane_sum(neighbour_sum([product(x, x) for x in values]), 32) for values in columns])
        mean = product(squares, Float32(1 / self.normalised))
        inverse = Float32(1.0) / square_root(mean + args.epsilon)
        for i in cutlass.range_constexpr(self.vectors):
            factors = exact(weights[i], self.dtype)
            scaled = [product(product(x, inverse), factor) for x, factor in zip(columns[i], factors, strict=True)]
            for word in cutlass.range_constexpr(WORDS):
                vectors[i][word] = one_word(pack_pair(scaled[2 * word], scaled[2 * word + 1], self.dtype))

    @cute.jit
    def rotate_values(self, words: cute.Tensor, cosines: cute.Tensor, sines: cute.Tensor, lane: Int32):
        """Rotate the rotary columns among a key's values."""
        rotated = turned(words, cosines, sines, self.dtype)
        for word in cutlass.range_constexpr(WORDS):
            words[word] = cutlass.select_(lane >= ROTARY_LANE, rotated[word], words[word])

    @cute.jit
    def spread(self, words: cute.Tensor, pair: cute.Tensor, lane: Int32):
        """Give each lane its two rotary columns, of those that lanes 24 to 31 have."""
        for word in cutlass.range_constexpr(WORDS):
            found = cute.arch.shuffle_sync(words[word], ROTARY_LANE + lane // WORDS)
            pair[0] = cutlass.select_(lane % WORDS == word, found, pair[0])

    @cute.jit
    def rotate_queries(self, args: CacheInsertArguments, unit: Int32, lane: Int32):
        """Rotate up to 16 queries of a token in place: all lanes of a warp. They share a position, so its angles are loaded once."""
        token, head = unit // args.groups, unit % args.groups * HEADS + lane // LANES
        if token < args.tokens:
            position = self.position_of(args, token)
            row = args.q_pe.toint() + token * args.q_pe_stride_token * ELEMENT_BYTES
            angles, inside = self.angles_at(args, position.value())
            cosines, sines = cute.make_rmem_tensor(WORDS, Float32), cute.make_rmem_tensor(WORDS, Float32)
            first = angles + lane % LANES * WORDS * FLOAT_BYTES
            load_floats(cosines, first, inside)
            load_floats(sines, first + PAIRS * FLOAT_BYTES, inside)
            row += VECTOR * (lane % LANES) * ELEMENT_BYTES
            if is_whole(row | args.q_pe_stride_head * ELEMENT_BYTES, VECTOR):
                self.rotate_heads(args, row, head, cosines, sines, True)
            else:
                self.rotate_heads(args, row, head, cosines, sines, False)

    @cute.jit
    def rotate_heads(
        self, args: CacheInsertArguments, row: Int64, head: Int32, cosines: cute.Tensor, sines: cute.Tensor, whole: cutlass.Constexpr
    ):
        """Rotate a lane's columns of the heads head, head + 4, head + 8 and head + 12. whole: they lie at multiples of 16 bytes.

        Each case has its own code: where branches meet, ptxas waits for loads.
        """
        heads = [head + HEADS_AT_ONCE * i for i in range(PASSES)]
        addresses = [row + each * args.q_pe_stride_head * ELEMENT_BYTES for each in heads]
        held = [registers(WORDS) for _ in heads]
        for words, address, each in zip(held, addresses, heads, strict=True):
            load_elements(words, address, whole, each < args.heads, None)
        for words, address, each in zip(held, addresses, heads, strict=True):
            rotated = turned(words, cosines, sines, self.dtype)
            for word in cutlass.range_constexpr(WORDS):
                words[word] = rotated[word]
            store_elements(words, address, whole, each < args.heads)

    def position_of(self, args: CacheInsertArguments, token: Int32) -> Loaded:
        """Start to load the position of a token."""
        return start_load(args.positions, token * args.position_stride_token, args.wide_positions, token)

    def angles_at(self, args: CacheInsertArguments, position: Int64) -> tuple[Int64, Boolean]:
        """Return the address of the cosines of a position, and whether there are any."""
        inside = (position >= 0) & (position < args.table_rows)
        return args.cos_sin.toint() + position * args.cos_sin_stride_position * FLOAT_BYTES, inside


def build(config: CacheRowsConfig, arch: Arch) -> KernelDefinition:
    """Return the variant, ready to compile."""
    kernel = CacheInsert(config, arch)
    divided = kernel.vectors if config.format.groups and config.format.scale == "fp32" else 0  # by the scale of a lane's group
    elements = {
        **dict.fromkeys(("kv_c", "k_pe", "q_pe", "norm_weight", "keys"), Uint16),
        **dict.fromkeys(("cos_sin", "descale_k"), Float32),
        "k_cache": Uint8,
    }
    return kernel.definition(elements, {"sqrt.rn.f32": 1, "rcp.rn.f32": 1 + divided})
