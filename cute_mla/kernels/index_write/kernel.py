"""index_write: rotates, transforms and quantises rows of the indexer; keys, normalised before, go to an index cache. Every architecture.

    grid      (ceil(rows / 8), 1, 1), 128 threads, no shared memory; 16 lanes take one row, a lane 8 neighbouring columns
    keys      a row is a token's key. A slot outside the cache: nothing of the row is written
    queries   a row is a head of a token; its scale goes into the head's weight
    norm      the mean, then the mean of squared distances from it: sums of neighbours, in the lane and by a butterfly of shuffles
    rotation  lanes 0 to 7. Half-split pairs lie in lanes 4 apart, interleaved ones in one lane
    Hadamard  butterflies at distances 1, 2, 4 in the lane and 1, 2, 4, 8 between lanes
    scale     one for the row: the largest magnitude as bits, by a butterfly, so that what is not finite comes out on top

Every operation is rounded to fp32 by itself (primitives/arithmetic.py), so the bytes are those of torch (ops/index_torch.py). Operands and
their meaning: cute_mla/spec/index_write.py.
"""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Boolean, Float32, Int32, Int64, Uint8, Uint16

from ...spec.arch import Arch
from ...spec.cache_rows import E4M3_MAX, VECTOR
from ...spec.index_write import (
    HADAMARD_SCALE,
    LANES,
    LEAST_AMAX,
    ROTARY,
    ROWS_PER_BLOCK,
    THREADS,
    IndexWriteArguments,
    IndexWriteConfig,
)
from ...spec.mla import ELEMENT_BYTES
from ...spec.mqa_logits import COLUMNS, SCALE_BYTES
from ..definition import KernelDefinition
from ..primitives.arithmetic import (
    E8M0_NAN,
    EXPONENT_OF_ONE_TWICE,
    INFINITE,
    MANTISSA_BITS,
    NAN,
    as_float,
    codes,
    exponent_above,
    lane_sum,
    largest,
    neighbour_sum,
    product,
    registers,
    signed,
    square_root,
)
from ..primitives.rows import FLOAT_BYTES, WORDS, element_at, exact, is_whole, load_elements, load_floats, start_load, store_words
from ..warp_kernel import WarpKernel, WarpLaunch

PAIRS = ROTARY // 2
ROTARY_LANES = ROTARY // VECTOR
PARTNER = PAIRS // VECTOR  # lanes between the columns of a half-split pair
EVERY_BYTE = 0x01010101  # times a byte: a word of four such bytes


def listed(tensor: cute.Tensor) -> list[Float32]:
    """Return the elements of a tensor in registers."""
    return [tensor[i] for i in range(cute.size(tensor))]


@cute.jit
def load_weight(weights: cute.Pointer, place: Int64, wide: Int32, wanted: Boolean) -> Float32:
    """Load a weight, fp32 or bf16; 0, and no access, unless wanted."""
    weight = Float32(0)
    if wanted:
        if wide != 0:
            weight = element_at(Float32, weights.toint() + place * FLOAT_BYTES).load()
        else:
            weight = element_at(BFloat16, weights.toint() + place * ELEMENT_BYTES).load().to(Float32)
    return weight


@cute.jit
def rotate(values: cute.Tensor, angles: Int64, lane: Int32, wanted: Boolean, half_split: Int32):
    """Rotate the columns of a lane. angles: address of the cosines of all pairs, after which their sines are; NaN unless wanted."""
    rotary = lane < ROTARY_LANES
    loads = wanted & rotary
    if half_split != 0:
        cosines, sines = cute.make_rmem_tensor(VECTOR, Float32), cute.make_rmem_tensor(VECTOR, Float32)
        first = angles + (lane % PARTNER) * VECTOR * FLOAT_BYTES
        load_floats(cosines, first, loads)
        load_floats(sines, first + PAIRS * FLOAT_BYTES, loads)
        for i in cutlass.range_constexpr(VECTOR):
            partner = cute.arch.shuffle_sync_bfly(values[i], PARTNER)
            turned = product(values[i], cosines[i]) + signed(product(partner, sines[i]), (lane & PARTNER) ^ PARTNER)
            values[i] = cutlass.select_(rotary, turned, values[i])
    else:
        cosines, sines = cute.make_rmem_tensor(VECTOR // 2, Float32), cute.make_rmem_tensor(VECTOR // 2, Float32)
        first = angles + lane * (VECTOR // 2) * FLOAT_BYTES
        load_floats(cosines, first, loads)
        load_floats(sines, first + PAIRS * FLOAT_BYTES, loads)
        for i in cutlass.range_constexpr(VECTOR // 2):
            even, odd = values[2 * i], values[2 * i + 1]
            values[2 * i] = cutlass.select_(rotary, product(even, cosines[i]) - product(odd, sines[i]), even)
            values[2 * i + 1] = cutlass.select_(rotary, product(odd, cosines[i]) + product(even, sines[i]), odd)


@cute.jit
def transform(values: cute.Tensor, lane: Int32):
    """Multiply a row with Hadamard's matrix in natural order, times 128^-1/2."""
    for step in cutlass.range_constexpr(VECTOR.bit_length() - 1):
        for i in cutlass.range_constexpr(VECTOR):
            if cutlass.const_expr(not i >> step & 1):
                low, high = values[i], values[i + (1 << step)]
                values[i], values[i + (1 << step)] = low + high, low - high
    for step in cutlass.range_constexpr(LANES.bit_length() - 1):
        for i in cutlass.range_constexpr(VECTOR):
            other = cute.arch.shuffle_sync_bfly(values[i], 1 << step)
            values[i] = signed(values[i], lane & (1 << step)) + other
    for i in cutlass.range_constexpr(VECTOR):
        values[i] = values[i] * Float32(HADAMARD_SCALE)


class IndexWrite(WarpKernel):
    """One variant of the kernel."""

    launch = WarpLaunch("index_write", "write", IndexWriteArguments, THREADS)

    def __init__(self, config: IndexWriteConfig, arch: Arch) -> None:
        super().__init__(config, arch)
        self.is_keys = config.rows == "keys"

    @cute.kernel
    def kernel(self, args: IndexWriteArguments):
        """Process one row per 16 lanes."""
        block, _, _ = cute.arch.block_idx()
        thread, _, _ = cute.arch.thread_idx()
        row, lane = block * ROWS_PER_BLOCK + thread // LANES, thread % LANES

        # The next kernel may be launched now: one that reads the results waits for this grid to end.
        cute.arch.griddepcontrol_launch_dependents()
        cute.arch.griddepcontrol_wait()

        # Slot, position and columns are asked for together. Lanes without a row take the last one, and write nothing.
        wanted = row < args.row_count
        row = cutlass.min(row, args.row_count - 1)
        token, head, slot_load = row, Int32(0), None
        if cutlass.const_expr(self.is_keys):
            slot_load = start_load(args.slot_mapping, token * args.slot_stride_token, args.wide_slots)
        else:
            token, head = row // args.heads, row % args.heads
        position_load = start_load(args.positions, token * args.position_stride_token, args.wide_positions, token)
        source = args.rows.toint() + (token * args.rows_stride_token + head * args.rows_stride_head) * ELEMENT_BYTES
        words = registers(WORDS)
        load_elements(words, source + VECTOR * lane * ELEMENT_BYTES, is_whole(source, VECTOR), Boolean(True), None)
        values = cute.make_rmem_tensor(VECTOR, Float32)
        for i, value in enumerate(exact(words, BFloat16)):
            # Behind a conversion alone, ptxas makes additions FHADD on sm100, which the model of the machine lacks.
            values[i] = cutlass.select_(wanted, value, Float32(0.0))
        position, slot = position_load.value(), Int64(0)
        if cutlass.const_expr(self.is_keys):
            self.normalise(values, args, lane)
            slot = slot_load.value()
            wanted = wanted & (slot >= 0) & (slot < args.slots)
        inside = (position >= 0) & (position < args.table_rows)
        angles = args.cos_sin.toint() + position * args.cos_sin_stride_position * FLOAT_BYTES
        rotate(values, angles, lane, inside, args.half_split)
        if args.hadamard != 0:
            transform(values, lane)

        amax = largest(listed(values), LANES)
        finite = amax < INFINITE
        exponent = exponent_above(amax, LEAST_AMAX / E4M3_MAX)
        reciprocal = as_float(cutlass.select_(finite, (EXPONENT_OF_ONE_TWICE - exponent) << MANTISSA_BITS, Int32(NAN)))
        rounded = codes([value * reciprocal for value in listed(values)])
        scale = cutlass.select_(finite, exponent << MANTISSA_BITS, Int32(NAN))
        leads = wanted & (lane == 0)
        if cutlass.const_expr(self.is_keys):
            self.store_key(args, slot, rounded, lane, wanted)
            if args.exponents != 0:
                scale = cutlass.select_(finite, exponent, Int32(E8M0_NAN)) * EVERY_BYTE
            self.store_scale(args, slot, scale, leads)
        else:
            target = args.codes.toint() + token * args.codes_stride_first + head * args.codes_stride_head
            store_words(rounded, target + VECTOR * lane, wanted)
            weight = load_weight(args.weights, token * args.weights_stride_token + head, args.wide_weights, leads)
            if leads:
                place = token * args.scaled_weights_stride_token + head
                element_at(Float32, args.scaled_weights.toint() + place * FLOAT_BYTES).store(weight * args.factor * as_float(scale))

    @cute.jit
    def normalise(self, values: cute.Tensor, args: IndexWriteArguments, lane: Int32):
        """Apply LayerNorm."""
        factors, summands = cute.make_rmem_tensor(VECTOR, Float32), cute.make_rmem_tensor(VECTOR, Float32)
        load_floats(factors, args.norm_weight.toint() + VECTOR * lane * FLOAT_BYTES, Boolean(True))
        load_floats(summands, args.norm_bias.toint() + VECTOR * lane * FLOAT_BYTES, Boolean(True))
        mean = product(lane_sum(neighbour_sum(listed(values)), LANES), Float32(1 / COLUMNS))
        distances = [value - mean for value in listed(values)]
        squares = neighbour_sum([product(distance, distance) for distance in distances])
        variance = product(lane_sum(squares, LANES), Float32(1 / COLUMNS))
        inverse = Float32(1.0) / square_root(variance + args.epsilon)
        for i in cutlass.range_constexpr(VECTOR):
            values[i] = product(product(distances[i], inverse), factors[i]) + summands[i]

    @cute.jit
    def store_key(self, args: IndexWriteArguments, slot: Int64, words: cute.Tensor, lane: Int32, wanted: Boolean):
        """Store the codes of a lane."""
        page, row = Int32(slot) // args.page_size, Int32(slot) % args.page_size
        store_words(words, args.codes.toint() + page * args.codes_stride_first + row * COLUMNS + VECTOR * lane, wanted)

    @cute.jit
    def store_scale(self, args: IndexWriteArguments, slot: Int64, scale: Int32, wanted: Boolean):
        """Store the scale of a key."""
        page, row = Int32(slot) // args.page_size, Int32(slot) % args.page_size
        behind = args.page_size * COLUMNS + row * SCALE_BYTES
        if wanted:
            element_at(Int32, args.codes.toint() + page * args.codes_stride_first + behind).store(scale)


def expected(config: IndexWriteConfig) -> dict[str, int]:
    """Return the instructions of a lane: the reciprocal and the root are IEEE's, where ptxas would take approximations as well."""
    keys = int(config.rows == "keys")
    return {"rcp.rn.f32": keys, "sqrt.rn.f32": keys, "cvt.rn.satfinite.e4m3x2.f32": VECTOR // 2}


def build(config: IndexWriteConfig, arch: Arch) -> KernelDefinition:
    """Return the variant, ready to compile."""
    kernel = IndexWrite(config, arch)
    elements = {
        **dict.fromkeys(("rows",), Uint16),
        **dict.fromkeys(("cos_sin", "norm_weight", "norm_bias", "scaled_weights"), Float32),
        **dict.fromkeys(("weights", "codes"), Uint8),
    }
    return kernel.definition(elements, expected(config))
