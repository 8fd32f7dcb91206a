"""split_plan: cuts the key tiles of a batch into num_parts parts of equal cost. Every architecture, one CTA.

    tiles_r = max(ceil(length_r / 64), 1)     cost_r = tiles_r + 3     C_r = sum of cost before r     T = C_batch
    step = ceil(T / num_parts)     cap = step + max(3 + (T > 8 batch) + (T > 16 batch), step * whole_eighths / 8)
    a part with a cut request may cost step + 3

    whole requests, if num_parts parts of at most cap hold them:
        boundary 0 is request 0, and after a boundary at request i the next one is at the last request j with C_j - C_i <= cap
    cuts, else:
        boundary p lies at cost x = min(p * step, T), in the request r with C_r <= x < C_r+1,
        and cuts it at tile max(x - C_r - 3, 0): 0 moves the boundary back to where the request starts.

Requests with different numbers of query tokens are cut into work units first, and "request" means unit above and below. Unit u lies in
the request r with U_r <= u < U_r+1, where U_r is the number of units before r. Where each query token is a unit, only their number is read.

The trick: nothing is walked. Cuts do not depend on one another, and boundaries between whole requests are found by doubling. 1,024
threads each own

    phase 0   a run of ceil(requests / 1024) requests, and every 1,024th unit
                                                     only if tokens differ: count its units; block scan -> s_cost[1025], the units before
                                                     each run; search it for each unit, walk inside the run; write the table of units
    phase 1   a run of ceil(batch / 1024) requests   sum its cost; block scan -> s_cost[1025], exclusive, 64 bits
    phase 2   one request, and one boundary          search s_cost for the boundary after it -> s_next[1025]; s_next of s_next, 9 times,
                                                     each time a step of 2^level boundaries -> the boundary; only where runs are requests
    phase 3   the same boundary                      if there are cuts: search s_cost, walk inside the run; -> s_req, s_tile[1025]
    phase 4   the same boundary                      is it a cut, is it the first of its request; block scan -> s_rows[1025],
                                                     the accumulator rows of all boundaries before it
    phase 5   one part, and every 1,024th request    write the plan row from boundaries p, p + 1; num_splits by searching s_req

No scratch beyond shared memory and no bound on batch: what is stored per run, not per request, is small and 64 bits wide, while
num_splits, int32, only ever holds accumulator rows. Operands and their meaning: cute_mla/spec/split_plan.py.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, Uint32, Uint64

from ...spec.arch import Arch
from ...spec.split_plan import (
    MAX_PARTS,
    MORE_SLACK_ABOVE,
    MOST_WHOLE_REQUESTS,
    PART_BEGIN_REQ,
    PART_BEGIN_SPLIT,
    PART_BEGIN_TILE,
    PART_END_OPEN,
    PART_END_REQ,
    PART_END_TILE,
    PART_FIRST_IS_SPLIT,
    PART_LAST_IS_SPLIT,
    PLAN_COLUMNS,
    TILE_KEYS,
    UNIT_ALL_TOKENS,
    UNIT_BASE,
    UNIT_COLUMNS,
    UNIT_FIRST_TOKEN,
    UNIT_LATER,
    UNIT_REQUEST,
    UNIT_TOKENS,
    SplitPlanArguments,
    SplitPlanConfig,
    piece_overhead,
)
from ..attention.lengths import Lengths, Units, VisibleTiles
from ..definition import KernelDefinition
from ..primitives.arithmetic import clip, inclusive_sum
from ..warp_kernel import WarpKernel, WarpLaunch

THREADS = 1024
WARPS = THREADS // 32
LEVELS = (THREADS - 1).bit_length()  # of doubling: boundaries are numbered by threads
assert THREADS >= MAX_PARTS, "one thread per boundary"
assert THREADS == MOST_WHOLE_REQUESTS, "one thread per request that may stay whole"


@cute.struct
class Smem:
    """cost: exclusive prefix sum over the runs of requests, total at the end. In phase 0 of units, without total.

    next, next_doubled: how far boundaries get from a request. whole: whether requests stay whole. req, tile: the boundaries. rows:
    exclusive prefix sum of the accumulator rows over the boundaries. warp_cost, warp_rows: totals of the warps, during a scan.
    """

    cost: cute.struct.MemRange[Int64, THREADS + 1]
    next: cute.struct.MemRange[Int32, THREADS + 1]
    next_doubled: cute.struct.MemRange[Int32, THREADS + 1]
    whole: cute.struct.MemRange[Int32, 1]
    warp_cost: cute.struct.MemRange[Int64, WARPS]
    warp_rows: cute.struct.MemRange[Int32, WARPS]
    req: cute.struct.MemRange[Int32, MAX_PARTS + 1]
    tile: cute.struct.MemRange[Int32, MAX_PARTS + 1]
    rows: cute.struct.MemRange[Int32, MAX_PARTS + 1]


@cute.jit
def planned_tiles(length: Int32) -> Int32:
    """Return max(ceil(length / 64), 1), computed so that neither a negative nor a huge length overflows."""
    return (cutlass.max(length, Int32(1)) - 1) // TILE_KEYS + 1


@cute.jit
def block_exclusive_scan(value, warp_totals: cute.Pointer, dtype: cutlass.Constexpr):
    """Return the exclusive prefix sum over the threads, and the total. Every thread must call it; it contains one barrier."""
    thread, _, _ = cute.arch.thread_idx()
    lane, warp = thread % 32, thread // 32  # not warp_idx(): it shuffles, which inside the branch below would hang or lie
    inclusive = inclusive_sum(value, lane, dtype)
    if lane == 31:
        warp_totals[warp] = inclusive
    cute.arch.sync_threads()
    # Each warp scans the 32 totals again, which saves a second barrier.
    totals = inclusive_sum(warp_totals[lane], lane, dtype)
    before = cute.arch.shuffle_sync(totals, cutlass.max(warp - 1, 0))
    start = before if warp > 0 else dtype(0)
    return start + inclusive - value, cute.arch.shuffle_sync(totals, 31)


@cute.jit
def sum_cost(lengths: Lengths, begin: Int32, end: Int32, overhead: cutlass.Constexpr[int]) -> Int64:
    """Return the cost of the requests [begin, end). overhead: of the start of each."""
    cost = Int64(0)
    for request in cutlass.range(begin, end, unroll=1):
        cost += Int64(planned_tiles(lengths.keys(request)) + overhead)
    return cost


@cute.jit
def count_not_above(values: cute.Pointer, count: Int32, bound):
    """Return the number of the ascending values[0 : count] that are <= bound; 1 <= count <= 2047."""
    found = Int32(0)
    for level in cutlass.range_constexpr(11):
        probe = found + (1024 >> level)
        value = values[cutlass.min(probe, count) - 1]  # always loaded, so that there is no branch
        found = probe if probe <= count and value <= bound else found
    return found


@cute.jit
def tokens_of(args: SplitPlanArguments, request: Int32):
    """Return (first query token, number of query tokens) of a request, inside the total_q that there are, whatever cu_seqlens_q holds."""
    first, end = clip(args.cu_seqlens_q[request], args.total_q), clip(args.cu_seqlens_q[request + 1], args.total_q)
    return first, clip(end - first, args.max_seqlen_q)


@cute.jit
def units_of(args: SplitPlanArguments, request: Int32) -> Int32:
    """Return the number of units of a request."""
    _, tokens = tokens_of(args, request)
    return Int32(Uint32(tokens + args.unit_tokens - 1) // Uint32(args.unit_tokens))


@cute.jit
def write_units(args: SplitPlanArguments, before: cute.Pointer, warp_totals: cute.Pointer) -> Int32:
    """Write the table of units and return their number. Every thread must call it; it contains barriers.

    before: int64 [1024], for the units before each run of requests; it ends up in any state.
    """
    thread, _, _ = cute.arch.thread_idx()
    run = (args.requests + (THREADS - 1)) // THREADS
    begin = cutlass.min(thread * run, args.requests)
    count = Int64(0)
    for request in cutlass.range(begin, cutlass.min(begin + run, args.requests), unroll=1):
        count += Int64(units_of(args, request))
    before_run, total = block_exclusive_scan(count, warp_totals, Int64)
    before[thread] = before_run
    cute.arch.sync_threads()
    units = Int32(cutlass.min(total, Int64(args.batch)))
    for unit in cutlass.range(thread, args.batch, THREADS, unroll=1):
        request, first, tokens, all_tokens, later = Int32(0), Int32(0), Int32(0), Int32(0), Int32(0)
        if unit < units:
            index = count_not_above(before, Int32(THREADS), Int64(unit)) - 1
            offset = unit - Int32(before[index])
            request = index * run
            last = cutlass.min(request + run, args.requests) - 1
            while request < last and offset >= units_of(args, request):
                offset -= units_of(args, request)
                request += 1
            first_of_all, all_tokens = tokens_of(args, request)
            earlier = offset * args.unit_tokens
            first = first_of_all + earlier
            tokens = cutlass.min(all_tokens - earlier, args.unit_tokens)
            later = all_tokens - earlier - tokens
        row = args.units + unit * UNIT_COLUMNS
        row[UNIT_REQUEST] = request
        row[UNIT_FIRST_TOKEN] = first
        row[UNIT_TOKENS] = tokens
        row[UNIT_ALL_TOKENS] = all_tokens
        row[UNIT_LATER] = later
        row[UNIT_BASE] = first + tokens - args.unit_tokens
        for column in cutlass.range_constexpr(UNIT_BASE + 1, UNIT_COLUMNS):
            row[column] = Int32(0)
    cute.arch.sync_threads()
    return units


def slack_of(total: Int64, batch: Int32, overhead: int) -> Int64:
    """Return whole_slack of the spec: the tiles by which parts of whole requests may exceed their share."""
    slack = Int64(overhead)
    for cost_each in MORE_SLACK_ABOVE:
        slack += Int64(total > Int64(batch) * cost_each)
    return slack


@cute.jit
def find_whole(costs: cute.Pointer, tables: tuple, batch: Int32, cap: Int64) -> Int32:
    """Return the boundary of this thread, if every part takes as many whole requests as fit: the request it lies at.

    Each of the batch <= 1,024 requests is a run. tables: two for next, which end up in any state. It contains a barrier for each
    level.
    """
    thread, _, _ = cute.arch.thread_idx()
    table, other = tables
    table[thread] = cutlass.min(count_not_above(costs, Int32(THREADS + 1), costs[thread] + cap) - 1, batch)
    if thread == 0:
        table[THREADS] = batch
    cute.arch.sync_threads()
    request = Int32(0)
    for level in cutlass.range_constexpr(LEVELS):
        ahead = table[request]
        request = ahead if (thread & (1 << level)) != 0 else request
        if cutlass.const_expr(level + 1 < LEVELS):
            other[thread] = table[table[thread]]
            if thread == 0:
                other[THREADS] = batch
            cute.arch.sync_threads()
            table, other = other, table
    return request


@cute.jit
def locate(lengths: Lengths, costs: cute.Pointer, cost: Int64, run: Int32, batch: Int32, overhead: cutlass.Constexpr[int]):
    """Return the request in which a cost < T lies, and the offset in it. overhead: as in sum_cost."""
    index = count_not_above(costs, Int32(THREADS), cost) - 1
    offset = cost - costs[index]
    request = index * run
    last = cutlass.min(request + run, batch) - 1
    inside = Boolean(False)
    while request < last and not inside:
        request_cost = Int64(planned_tiles(lengths.keys(request)) + overhead)
        inside = offset < request_cost
        if not inside:
            offset -= request_cost
            request += 1
    return request, Int32(offset)


@cute.jit
def write_part(row: cute.Pointer, lengths: Lengths, begin: tuple, end: tuple, split: Int32, batch: Int32):
    """Write one row of the plan, for the part between the boundaries begin and end, each (request, tile).

    batch: where a part without work begins and ends. split: index among the splits of begin's request. Written as scalars: a caller's
    table need not be aligned to more than an int32.
    """
    begin_req, begin_tile = begin
    end_req, end_tile = end
    first, last, end_open = Int32(0), Int32(0), Int32(0)
    if begin_req == end_req and begin_tile == end_tile:
        begin_req, end_req, begin_tile, end_tile, split = batch, batch, Int32(0), Int32(0), Int32(0)
    else:
        first, last = Int32(begin_tile > 0), Int32(end_tile > 0)
        if end_tile == 0:  # the part ends where a request starts: it owns the tail of the one before
            end_req -= 1
            end_tile = planned_tiles(lengths.keys(end_req))
            end_open = Int32(1)
        if begin_req == end_req:
            first = first | last
            last = first
    row[PART_BEGIN_REQ] = begin_req
    row[PART_END_REQ] = end_req
    row[PART_BEGIN_TILE] = begin_tile
    row[PART_END_TILE] = end_tile
    row[PART_BEGIN_SPLIT] = split
    row[PART_FIRST_IS_SPLIT] = first
    row[PART_LAST_IS_SPLIT] = last
    row[PART_END_OPEN] = end_open


class SplitPlan(WarpKernel):
    """The kernel."""

    launch = WarpLaunch("split_plan", "planner", SplitPlanArguments, THREADS)

    def __init__(self, config: SplitPlanConfig, arch: Arch) -> None:
        super().__init__(config, arch)
        self.overhead = piece_overhead(arch)

    @cute.kernel
    def kernel(self, args: SplitPlanArguments):
        """Write the plan and num_splits, in five phases of one CTA, and before them the table of units."""
        thread, _, _ = cute.arch.thread_idx()
        # a plan is made for causal calls; others have more keys in all units but the last one of a request
        units = Units(args.units, args.requests, args.total_q, args.unit_tokens, Int32(1))
        window = VisibleTiles(args.reach, args.sink_tiles)
        keys = Lengths(args.lengths, args.extra_lengths, args.max_keys, args.extra_max_keys, units, window)
        smem = cutlass.memory.SmemAllocator().allocate(Smem)
        costs, reqs, tiles, rows = smem.cost.data_ptr(), smem.req.data_ptr(), smem.tile.data_ptr(), smem.rows.data_ptr()
        whole = smem.whole.data_ptr()

        # The consumer may be launched now: it waits for this grid to end before it reads the plan.
        cute.arch.griddepcontrol_launch_dependents()
        cute.arch.griddepcontrol_wait()

        # Phase 0: units.
        batch = args.batch
        if args.units.toint() != 0:
            batch = write_units(args, costs, smem.warp_cost.data_ptr())
        elif args.cu_seqlens_q.toint() != 0:
            batch = clip(args.cu_seqlens_q[args.requests], args.batch)

        # Phase 1: cost of the runs.
        run = (batch + (THREADS - 1)) // THREADS
        run_begin = cutlass.min(thread * run, batch)
        run_cost = sum_cost(keys, run_begin, cutlass.min(run_begin + run, batch), self.overhead)
        cost_before, total = block_exclusive_scan(run_cost, smem.warp_cost.data_ptr(), Int64)
        costs[thread] = cost_before

        # Phase 2: boundaries between whole requests.
        step = (total + Int64(args.num_parts - 1)) // Int64(args.num_parts)
        cap = step + cutlass.max(Int64(Uint64(step * args.whole_eighths) >> 3), slack_of(total, batch, self.overhead))
        req, tile = batch, Int32(0)
        if thread == 0:
            costs[THREADS] = total
            whole[0] = Int32(0)
        cute.arch.sync_threads()
        if run <= 1:
            req = find_whole(costs, (smem.next.data_ptr(), smem.next_doubled.data_ptr()), batch, cap)
            if thread == args.num_parts - 1 and total - costs[req] <= cap:
                whole[0] = Int32(1)
            cute.arch.sync_threads()

        # Phase 3: cuts. Threads past num_parts only take part in the barriers.
        if thread < args.num_parts:
            cost = Int64(thread) * step
            if whole[0] == 0:
                req = batch
            if whole[0] == 0 and cost < total:
                req, offset = locate(keys, costs, cost, run, batch, self.overhead)
                tile = cutlass.max(offset - self.overhead, 0)
            reqs[thread] = req
            tiles[thread] = tile
        if thread == 0:
            reqs[args.num_parts] = batch
            tiles[args.num_parts] = Int32(0)
        cute.arch.sync_threads()

        # Phase 4: accumulator rows before each boundary. k cuts of a request make k + 1 rows, the extra one at its first cut.
        added = Int32(0)
        if tile > 0:  # never at boundary 0
            added = Int32(2)
            if tiles[thread - 1] > 0 and reqs[thread - 1] == req:
                added = Int32(1)
        rows_before, total_rows = block_exclusive_scan(added, smem.warp_rows.data_ptr(), Int32)
        if thread < args.num_parts:
            rows[thread] = rows_before
        if thread == 0:
            rows[args.num_parts] = total_rows
        cute.arch.sync_threads()

        # Phase 5: the plan and num_splits.
        if thread < args.num_parts:
            split = Int32(0)
            if tile > 0:
                split = rows_before + added - 1 - rows[count_not_above(reqs, args.num_parts + 1, req - 1)]
            end = (reqs[thread + 1], tiles[thread + 1])
            write_part(args.plan + thread * PLAN_COLUMNS, keys, (req, tile), end, split, args.batch)
        for request in cutlass.range(thread, args.batch + 1, THREADS, unroll=1):
            args.num_splits[request] = rows[count_not_above(reqs, args.num_parts + 1, cutlass.min(request, batch) - 1)]


def build(config: SplitPlanConfig, arch: Arch) -> KernelDefinition:
    """Return the kernel's source, ready to compile."""
    smem_bytes = Smem.size_in_bytes()  # type: ignore[attr-defined]  # cute.struct adds it
    return SplitPlan(config, arch).definition({}, {"bar.sync": 9 + LEVELS}, smem_bytes)
