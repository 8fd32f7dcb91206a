"""cache_insert: normalises, rotates, quantises and writes keys to a paged cache, and rotates queries in place. Every architecture.

    grid      (ceil(tokens / 4) + ceil(tokens * heads / 64), 1, 1), 128 threads, no shared memory. CTAs in front take keys, a warp each;
              those behind take the rotary columns of 64 queries, 8 lanes each, 4 times 16 of them
    a key     as in primitives/key_rows.py, all of it loaded first. Where values are rotated (fp8_584, v41), lanes 24 to 31 have the rotary
              columns as the end of the second vector, wherever they come from
    norm      a sum of squares over neighbouring columns, by a butterfly; rounded to the keys' type, as is the rotation behind it
    write     that of cache_write (primitives/key_writer.py), from the rounded columns

The trick is that nothing else is done: every step rounds as the part that stands alone does, so the bits are those of the parts one after
the other (ops/norm_rope.py, then cache_write). Operands and their meaning: cute_mla/spec/cache_insert.py.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint8, Uint16

from ...manifest import Role, kernel_name
from ...spec.arch import Arch
from ...spec.cache_format import CacheFormat
from ...spec.cache_insert import (
    LANES,
    PARAMS,
    PASSES,
    ROWS,
    ROWS_PER_BLOCK,
    THREADS,
    CacheInsertArguments,
    CacheInsertConfig,
    normalised_columns,
    rotates,
    rotates_values,
)
from ...spec.cache_rows import KEYS_PER_BLOCK, VECTOR
from ...spec.mla import D_ROPE, ELEMENT_BYTES
from ..attention.kernel import ELEMENT_TYPES
from ..definition import KernelDefinition
from ..example_arguments import example_arguments
from ..primitives.elements import pack_pair
from ..primitives.key_rows import (
    PAIR,
    SPAN,
    WORDS,
    Key,
    exact,
    is_whole,
    load_elements,
    registers,
    store_elements,
)
from ..primitives.key_writer import KeyWriter
from ..primitives.nullable import load_or_one
from ..primitives.row_sums import FLOAT_BYTES, lane_sum, load_floats, neighbour_sum, product, square_root
from ..primitives.wide_integers import load_integer

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


class CacheInsert:
    """One variant of the kernel."""

    def __init__(self, config: CacheInsertConfig, arch: Arch) -> None:
        self.name = kernel_name("cache_insert", arch.name, config.name)
        self.cache: CacheFormat = config.format
        self.dtype = ELEMENT_TYPES[config.dtype]
        self.writer = KeyWriter(config.format, self.dtype)
        self.normalised = normalised_columns(config.format)
        self.vectors = self.normalised // SPAN
        self.rotates = rotates(config.format)
        self.rotates_values = rotates_values(config.format)
        self.has_pair = self.writer.rotary and not self.rotates_values  # rotary columns lie apart from the normalised ones

    @cute.jit
    def host(self, args: CacheInsertArguments):
        """Compile for the types of the arguments; never run, since the runtime launches the kernel itself."""
        self.kernel.set_name_prefix(self.name, remove_cutlass_symbol=True, keep_mangled_name=False)
        self.kernel(args).launch(grid=(1, 1, 1), block=(THREADS, 1, 1), use_pdl=True)

    @cute.kernel
    def kernel(self, args: CacheInsertArguments):
        """Process one key per warp, or the queries of a CTA."""
        block, _, _ = cute.arch.block_idx()
        thread, _, _ = cute.arch.thread_idx()

        # The next kernel may be launched now: one that reads the results waits for this grid to end.
        cute.arch.griddepcontrol_launch_dependents()
        cute.arch.griddepcontrol_wait()

        if block < args.key_blocks:
            self.insert_key(args, block * KEYS_PER_BLOCK + thread // 32, thread % 32)
        elif cutlass.const_expr(self.rotates):
            self.rotate_queries(args, (block - args.key_blocks) * ROWS_PER_BLOCK + thread // LANES, thread % LANES)

    @cute.jit
    def insert_key(self, args: CacheInsertArguments, token: Int32, lane: Int32):
        """Process the key of a token: all lanes of a warp."""
        slot, angles, inside = Int64(-1), Int64(0), Boolean(False)
        if cutlass.const_expr(self.rotates):
            angles, inside = self.angles_of(args, token, token < args.tokens)
        if token < args.tokens:
            slot = load_integer(args.slot_mapping, token * args.slot_stride_token, args.wide_slots)
        written = slot >= 0 and slot < args.slots
        if written or (token < args.tokens and args.keys.toint() != 0):
            vectors = [registers(WORDS) for _ in range(self.vectors)]
            pair = registers(1)
            weights = [registers(WORDS) for _ in range(self.vectors)]
            cosines = cute.make_rmem_tensor(WORDS if self.rotates_values else 1, Float32)
            sines = cute.make_rmem_tensor(WORDS if self.rotates_values else 1, Float32)
            self.load_key(args, vectors, pair, token, lane)
            if cutlass.const_expr(self.rotates):
                self.load_angles(cosines, sines, angles, inside, lane)
            self.load_weights(args, weights, lane)
            self.normalise(args, vectors, weights)
            if cutlass.const_expr(self.rotates):
                self.rotate_key(vectors, pair, cosines, sines, lane)
            if args.keys.toint() != 0:
                self.store_key(args, vectors, pair, token, lane)
            if written:
                page, row = Int32(slot) // args.page_size, Int32(slot) % args.page_size
                address = args.k_cache.toint() + page * args.cache_stride_page
                key = Key.of(self.cache, address, row, args.cache_stride_row, args.page_size)
                scale = load_or_one(args.descale_k) if cutlass.const_expr(self.writer.is_flat) else Float32(1.0)
                for i in cutlass.range_constexpr(self.vectors):
                    self.writer.write_vector(key, vectors[i], i, lane, scale, args.power_of_two)
                if cutlass.const_expr(self.writer.rotary):
                    if cutlass.const_expr(self.rotates_values):
                        self.spread(vectors[-1], pair, lane)
                    self.writer.write_pair(key, pair, lane, scale)

    @cute.jit
    def load_key(self, args: CacheInsertArguments, vectors: cutlass.Constexpr, pair: cute.Tensor, token: Int32, lane: Int32):
        """Load all columns of a key."""
        latent = args.kv_c.toint() + token * args.kv_c_stride_token * ELEMENT_BYTES
        rotary = args.k_pe.toint() + token * args.k_pe_stride_token * ELEMENT_BYTES
        for i in cutlass.range_constexpr(self.vectors):
            column = SPAN * i + VECTOR * lane
            row, address = latent, latent + column * ELEMENT_BYTES
            if cutlass.const_expr(self.rotates_values and self.writer.rotary > 0 and i == self.vectors - 1):
                row = cutlass.select_(lane >= ROTARY_LANE, rotary, row)
                address = cutlass.select_(lane >= ROTARY_LANE, rotary + (lane - ROTARY_LANE) * VECTOR * ELEMENT_BYTES, address)
            load_elements(vectors[i], address, is_whole(row, VECTOR), Boolean(True))
        if cutlass.const_expr(self.has_pair):
            load_elements(pair, rotary + PAIR * lane * ELEMENT_BYTES, is_whole(rotary, PAIR), Boolean(True))

    @cute.jit
    def load_angles(self, cosines: cute.Tensor, sines: cute.Tensor, angles: Int64, inside: Boolean, lane: Int32):
        """Load the cosines and sines of a lane's pairs; NaN for a position outside the table."""
        first, wanted = angles + lane * FLOAT_BYTES, inside
        if cutlass.const_expr(self.rotates_values):
            first = angles + (lane - ROTARY_LANE) * WORDS * FLOAT_BYTES
            wanted = inside & (lane >= ROTARY_LANE)
        load_floats(cosines, first, wanted)
        load_floats(sines, first + PAIRS * FLOAT_BYTES, wanted)

    @cute.jit
    def load_weights(self, args: CacheInsertArguments, weights: cutlass.Constexpr, lane: Int32):
        """Load the norm's weights of a lane's columns."""
        first = args.norm_weight.toint()
        for i in cutlass.range_constexpr(self.vectors):
            load_elements(weights[i], first + (SPAN * i + VECTOR * lane) * ELEMENT_BYTES, is_whole(first, VECTOR), Boolean(True))

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
                vectors[i][word] = pack_pair(scaled[2 * word], scaled[2 * word + 1], self.dtype)

    @cute.jit
    def rotate_key(self, vectors: cutlass.Constexpr, pair: cute.Tensor, cosines: cute.Tensor, sines: cute.Tensor, lane: Int32):
        """Rotate the rotary columns of a key."""
        if cutlass.const_expr(self.rotates_values):
            words = vectors[-1]
            rotated = turned(words, cosines, sines, self.dtype)
            for word in cutlass.range_constexpr(WORDS):
                words[word] = cutlass.select_(lane >= ROTARY_LANE, rotated[word], words[word])
        else:
            pair[0] = turned(pair, cosines, sines, self.dtype)[0]

    @cute.jit
    def store_key(self, args: CacheInsertArguments, vectors: cutlass.Constexpr, pair: cute.Tensor, token: Int32, lane: Int32):
        """Store all columns of a key, as they are before they are quantised."""
        target = args.keys.toint() + token * args.keys_stride_token * ELEMENT_BYTES
        for i in cutlass.range_constexpr(self.vectors):
            column = SPAN * i + VECTOR * lane
            store_elements(vectors[i], target + column * ELEMENT_BYTES, is_whole(target, VECTOR), Boolean(True))
        if cutlass.const_expr(self.has_pair):
            column = self.normalised + PAIR * lane
            store_elements(pair, target + column * ELEMENT_BYTES, is_whole(target, PAIR), Boolean(True))

    @cute.jit
    def spread(self, words: cute.Tensor, pair: cute.Tensor, lane: Int32):
        """Give each lane its two rotary columns, of those that lanes 24 to 31 have."""
        for word in cutlass.range_constexpr(WORDS):
            found = cute.arch.shuffle_sync(words[word], ROTARY_LANE + lane // WORDS)
            pair[0] = cutlass.select_(lane % WORDS == word, found, pair[0])

    @cute.jit
    def rotate_queries(self, args: CacheInsertArguments, first: Int32, lane: Int32):
        """Rotate queries first, first + 16, first + 32 and first + 48 in place."""
        held = [registers(WORDS) for _ in range(PASSES)]
        for i in cutlass.range_constexpr(PASSES):
            query = first + ROWS * i
            row = self.query_at(args, query)
            load_elements(held[i], row + VECTOR * lane * ELEMENT_BYTES, is_whole(row, VECTOR), query < args.queries)
        for i in cutlass.range_constexpr(PASSES):
            query = first + ROWS * i
            wanted = query < args.queries
            angles, inside = self.angles_of(args, query // args.heads, wanted)
            cosines, sines = cute.make_rmem_tensor(WORDS, Float32), cute.make_rmem_tensor(WORDS, Float32)
            load_floats(cosines, angles + lane * WORDS * FLOAT_BYTES, inside)
            load_floats(sines, angles + (PAIRS + lane * WORDS) * FLOAT_BYTES, inside)
            rotated = turned(held[i], cosines, sines, self.dtype)
            for word in cutlass.range_constexpr(WORDS):
                held[i][word] = rotated[word]
            row = self.query_at(args, query)
            store_elements(held[i], row + VECTOR * lane * ELEMENT_BYTES, is_whole(row, VECTOR), wanted)

    def query_at(self, args: CacheInsertArguments, query: Int32) -> Int64:
        """Return the address of a query's rotary columns."""
        token, head = query // args.heads, query % args.heads
        return args.q_pe.toint() + (token * args.q_pe_stride_token + head * args.q_pe_stride_head) * ELEMENT_BYTES

    @cute.jit
    def angles_of(self, args: CacheInsertArguments, token: Int32, wanted: Boolean) -> tuple[Int64, Boolean]:
        """Return the address of the cosines of a token's position, and whether there are any."""
        position = Int64(token)
        if wanted and args.positions.toint() != 0:
            position = load_integer(args.positions, token * args.position_stride_token, args.wide_positions)
        inside = wanted & (position >= 0) & (position < args.table_rows)
        return args.cos_sin.toint() + position * args.cos_sin_stride_position * FLOAT_BYTES, inside


def build(config: CacheInsertConfig, arch: Arch) -> KernelDefinition:
    """Return the variant, ready to compile."""
    kernel = CacheInsert(config, arch)
    elements = {
        **dict.fromkeys(("kv_c", "k_pe", "q_pe", "norm_weight", "keys"), Uint16),
        **dict.fromkeys(("cos_sin", "descale_k"), Float32),
        "k_cache": Uint8,
    }
    return KernelDefinition(
        op="cache_insert",
        config=config,
        host=kernel.host,
        args=(example_arguments(CacheInsertArguments, elements),),
        params=PARAMS,
        block=(THREADS, 1, 1),
        cluster=(1, 1, 1),
        smem_bytes=0,
        roles=(Role("insert", 0, THREADS // 32),),
        expected={"sqrt.rn.f32": 1, "rcp.rn.f32": 1},
    )
