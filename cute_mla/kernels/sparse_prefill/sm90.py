"""Sparse prefill on Hopper.

For every query token and head r, over the rows j that the token's indices name and that exist:

    s_rj = <q_r, k_j>     p = softmax(scale * s)     out_r = sum_j p_rj k_j[:512]

A group of CTAs along x holds the heads of a query token, 64 each, and takes the tokens z, z + grid z and so on, 64 indices (one
tile) at a time.

Roles (512 threads):
  copy     warps 0, 1: cp.async of rows to the stages
  courier  warp 2: hands over stages that have landed, of a pair to the peer as well
  scout    warp 3: indices, checks, which keys are there; Q of the next token to L2, and to shared memory
  score    warpgroup 1: S = Q K^T, softmax, P to shared memory, lse, the greatest logit, lse of the first indices; the sink
  output   warpgroups 2, 3

Score and output are the decode kernels': dense_decode/sm90.py describes tiles, their pipelines and the trick. In front of them
are (producer -> consumer; arrivals per phase):
  valid_ready[3]   scout -> copy, courier, score   1: rows of a tile, and a bit per key
  kv_landed[10]    copy -> courier                 64: the threads' copies, as they complete
  rope_landed[3]   copy -> courier                 64
  kv_ready[10]     courier -> score, output        1; of a stage that a pair shares, and the bytes of the peer's half
  rope_ready[3]    courier -> score                1
  queries_landed   scout -> score                  32: the lanes' copies, as they complete
  queries_free     score -> scout                  4: Q in shared memory has been read

Q of a token comes while the token before is finished. As soon as the last S of a token is complete, the scout copies the column tiles of
Q that go to registers to where the others were. Score takes them when it has written P, and then the others come: sm90/staged_queries.py.

A pair shares the first two stages of a tile: each CTA copies half of their keys and hands them to the peer. The other two each copies
whole: they take the place of stages that have just come free, and the peer's half would come too late. The RoPE columns come between.

A tile without any key is passed by: of it there are only the handshakes. All roles walk from token to token on their own, and the scout
looks ahead over the end of a token.
"""

from __future__ import annotations

from functools import partial

import cutlass
from cutlass import Boolean, Int32, cute

from ...spec.arch import Arch
from ...spec.mla import D_LATENT, ELEMENT_BYTES
from ...spec.sparse_prefill import SparsePrefillConfig
from ...spec.split_plan import TILE_KEYS
from ..attention.kernel import AttentionKernel
from ..attention.scheduler import BOX_COLUMNS
from ..attention.softmax import OnlineSoftmax, SinkScale
from ..definition import KernelDefinition
from ..sm90.arrivals import await_peer, initialise
from ..sm90.config import (
    BOX_BYTES,
    OUTPUT_REGISTERS,
    STAGE_BYTES,
    STAGE_COLUMNS,
    STAGES_PER_TILE,
    Geometry,
    Tiles,
    TileState,
)
from ..sm90.gather_split import HALF_BYTES, HALF_KEYS, HALVES, halves_of_cta, hand_over, peer_shift
from ..sm90.output import LatentOutput, OutputRole
from ..sm90.row_copy import COPY_WARPS, COURIER_WARP, GATHER_ROLES, CopyLane, CopyPipes, TileRows, arrive_landed
from ..sm90.staged_queries import QueryBarriers, QueryLoader, StagedScores
from ..sm90.valid_keys import AbsentKeyMask, has_keys
from ..sm90.warpgroups import THREADS, WARPGROUP, group_of, named_barriers, role_table, set_registers, sync_start
from .abi import SparsePrefillAbi
from .operands import IndexList, Operands
from .sm90_score import IndexerRows, TokenScoreRole
from .sm90_walk import Cursor, first_tile, for_each_tile, next_tile

ROPE_STAGES = 3
VALID_STAGES = ROPE_STAGES  # a tile's bits take the place of those of the tile whose RoPE stage it gets

Q_TILES_IN_REGISTERS = 5
SHARED_STAGES = 2  # of a tile, between the CTAs of a pair: the first ones


def geometry_of(d_qk: int) -> Geometry:
    """Return the geometry: copies need no registers for bytes, so that Q gets them. Boxes hold as many column tiles as go to registers."""
    return Geometry(
        d_qk=d_qk,
        q_tiles_in_registers=Q_TILES_IN_REGISTERS,
        kv_stages=10,
        rope_stages=ROPE_STAGES,
        producer_registers=40,
        score_registers=152,
        ready_arrivals=1,
        valid_stages=VALID_STAGES,
        rope_after=2,
        takes_turns=True,
        q_boxes=Q_TILES_IN_REGISTERS,
        tells_targets=False,
    )


class SparsePrefillSm90(AttentionKernel):
    """One variant of the kernel."""

    threads = THREADS

    def __init__(self, config: SparsePrefillConfig, arch: Arch) -> None:
        super().__init__(SparsePrefillAbi(config), arch)
        self.cluster = config.cluster
        self.geometry = geometry_of(config.d_qk)
        self.smem = self.geometry.smem(self.dtype, *CopyPipes.fields(self.geometry), *QueryBarriers.fields(), *IndexerRows.fields())

    @cute.jit
    def run(self, operands: Operands):
        """Allocate, initialise the barriers, and give each role its warps."""
        memory, geometry = self.smem.allocate(), self.geometry
        tiles, pipes = Tiles.create(memory), CopyPipes.create(memory)
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == 0:
            with cute.arch.elect_one():
                pipes.initialise_copies()
                QueryBarriers.create(memory).initialise()
                initialise(pipes, geometry, self.cluster)
        sync_start(self.cluster)
        # the lengths, the indices, Q and the latent may come from the kernel before
        cute.arch.griddepcontrol_wait()

        group = group_of(warp)
        thread = cute.arch.thread_idx()[0] % WARPGROUP
        if group == 0:
            set_registers(geometry.producer_registers)
            producer = cute.arch.make_warp_uniform(cute.arch.warp_idx())
            if producer < COPY_WARPS:
                CopyRole(geometry, self.cluster).run(operands, tiles, pipes, thread)
            elif producer == COURIER_WARP:
                CourierRole(geometry, self.cluster).run(operands, tiles, pipes)
            else:
                ScoutRole(geometry, QueryBarriers.create(memory)).run(operands, tiles, pipes)
        elif group == 1:
            set_registers(geometry.score_registers)
            scores = partial(StagedScores.from_loader, geometry, self.dtype, QueryBarriers.create(memory))
            softmax = partial(OnlineSoftmax.create, keeps_maximum=True)
            score = TokenScoreRole(
                scores, AbsentKeyMask(), SinkScale(), softmax, validity=ScoutedTiles(), writes_max_logits=True, reads_ahead=True,
                indexer=IndexerRows.create(memory),
            )  # fmt: skip
            score.run(operands, tiles, pipes, thread)
        else:
            set_registers(OUTPUT_REGISTERS)
            output = partial(LatentOutput.create, geometry, self.dtype, self.cluster, validity=ScoutedTiles())
            OutputRole(geometry.stage_strides[0], output, self.dtype).run(operands, tiles, pipes, thread, group - 2)


class ScoutedTiles:
    """Tiles of which the scout has told whether they have keys."""

    def wait(self, pipes: CopyPipes, state: TileState) -> None:
        """Block until the scout has told of a tile."""
        pipes.valid_ready.consumer_wait(state.rope)

    def has_keys(self, tiles: Tiles, stage: Int32) -> Boolean:
        """Return whether a tile has any key."""
        return has_keys(tiles, stage)


class ScoutRole:
    """One warp: indices, checks, which keys are present; Q."""

    def __init__(self, geometry: Geometry, queries: QueryBarriers) -> None:
        self.geometry = geometry
        self.queries = queries

    @cute.jit
    def run(self, operands: Operands, tiles: Tiles, pipes: CopyPipes):
        """Wait rope_free, queries_free. Signal valid_ready, queries_landed. Indices are asked for a tile ahead."""
        cursor = first_tile(operands)
        entries = cursor.entries()
        tile, token = Int32(0), Int32(0)
        while cursor.token <= operands.schedule.last_request():
            # The tile VALID_STAGES before has been worked off. To wait for an older one would be to be overtaken: this stage's next
            # phase must not end before the scout has announced the tile.
            pipes.rope_free.producer_acquire(tile)
            self.announce(tiles, pipes, cursor.indices, entries, tile)
            following = next_tile(operands, cursor, self.geometry.d_qk)
            entries = following.entries()
            token = self.bring_queries(operands, tiles, cursor, token)
            cursor = following
            tile = tile + 1

    @cute.jit
    def bring_queries(self, operands: Operands, tiles: Tiles, cursor: Cursor, number: Int32) -> Int32:
        """Bring Q of a token, the number-th that has keys, at its first tile. Return the number of the next one. As QueryLoader.load."""
        if cursor.position == 0:
            QueryLoader(self.geometry).load(operands, tiles, self.queries, cursor.token, number)
            number = number + 1
        return number

    @cute.jit
    def announce(self, tiles: Tiles, pipes: CopyPipes, indices: IndexList, entries: tuple[Int32, Int32], tile: Int32):
        """Publish which rows a tile has, from the indices of this lane's keys."""
        low, high = (indices.checked(entry) for entry in entries)
        stage, lane = pipes.valid_ready.stage(tile), cute.arch.lane_idx()
        rows = pipes.sRows + (stage * TILE_KEYS + lane)
        rows.store(low)
        (rows + HALF_KEYS).store(high)
        bits = [cute.arch.vote_ballot_sync(row >= 0) for row in (low, high)]
        if lane == 0:
            (pipes.sBases + stage).store(indices.base)
            words = cute.recast_ptr(tiles.sValid, dtype=Int32) + stage * HALVES
            words.store(bits[0])
            (words + 1).store(bits[1])
        pipes.valid_ready.producer_commit(tile)


class CopyRole:
    """Two warps: cp.async of rows to the stages. cluster: CTAs that share the tiles."""

    def __init__(self, geometry: Geometry, cluster: int) -> None:
        self.geometry = geometry
        self.cluster = cluster

    @cute.jit
    def run(self, operands: Operands, tiles: Tiles, pipes: CopyPipes, thread: Int32):
        """Wait valid_ready, kv_free, rope_free. Signal kv_landed, rope_landed."""
        lane = CopyLane.create(thread, halves_of_cta(self.cluster))
        for_each_tile(operands.schedule, partial(self.copy_tile, operands, tiles, pipes, lane))
        cute.arch.griddepcontrol_launch_dependents()

    @cute.jit
    def copy_tile(self, operands: Operands, tiles: Tiles, pipes: CopyPipes, lane: CopyLane, tile: Int32):
        """Wait valid_ready, kv_free, rope_free. Signal kv_landed, rope_landed."""
        present = told_of_keys(tiles, pipes, tile)
        rows = TileRows.create(pipes, tile, operands.latent.row_stride)
        for step in cutlass.range_constexpr(STAGES_PER_TILE):
            if cutlass.const_expr(step == self.geometry.rope_after) and present:
                self.copy_rope(tiles, pipes, lane, rows, tile)
            use = tile * STAGES_PER_TILE + step
            pipes.kv_free.producer_acquire(use)
            if present:
                # of a stage that a pair shares, the other half comes from the peer
                source = self.geometry.first_column(step) * ELEMENT_BYTES
                halves = HALVES // self.cluster if shares_stage(step, self.cluster) else HALVES
                rows.copy(lane, kv_stage(tiles, pipes, use), source, STAGE_COLUMNS // BOX_COLUMNS, halves)
            arrive_landed(pipes.kv_landed.barrier(use))
        if not present:
            # last: of such a tile the score role waits for rope_ready only, which must tell that all its stages have been waited for
            pipes.rope_free.producer_acquire(tile)
            arrive_landed(pipes.rope_landed.barrier(tile))

    @cute.jit
    def copy_rope(self, tiles: Tiles, pipes: CopyPipes, lane: CopyLane, rows: TileRows, tile: Int32):
        """Copy the RoPE columns of all keys of a tile, where they have any. Wait rope_free. Signal rope_landed."""
        pipes.rope_free.producer_acquire(tile)
        if cutlass.const_expr(self.geometry.has_rope):
            target = tiles.sRope.iterator.toint() + pipes.rope_ready.stage(tile) * BOX_BYTES
            rows.copy(lane, target, D_LATENT * ELEMENT_BYTES, 1)
        arrive_landed(pipes.rope_landed.barrier(tile))


class CourierRole:
    """One warp: hands over stages that have landed, of a pair to the peer as well. cluster: CTAs that share the tiles."""

    def __init__(self, geometry: Geometry, cluster: int) -> None:
        self.geometry = geometry
        self.cluster = cluster

    @cute.jit
    def run(self, operands: Operands, tiles: Tiles, pipes: CopyPipes):
        """Wait valid_ready, kv_landed, rope_landed. Signal kv_ready, rope_ready."""
        tiles_done = for_each_tile(operands.schedule, partial(self.deliver_tile, tiles, pipes))
        if cutlass.const_expr(self.cluster > 1):
            await_peer(pipes, self.geometry, tiles_done)

    @cute.jit
    def deliver_tile(self, tiles: Tiles, pipes: CopyPipes, tile: Int32):
        """Wait valid_ready, kv_landed, rope_landed. Signal kv_ready, rope_ready."""
        present = told_of_keys(tiles, pipes, tile)
        for step in cutlass.range_constexpr(STAGES_PER_TILE):
            if cutlass.const_expr(step == self.geometry.rope_after) and present:
                self.deliver_rope(pipes, tile)
            use = tile * STAGES_PER_TILE + step
            pipes.kv_landed.consumer_wait(use)
            cute.arch.fence_proxy("async.shared", space="cta")
            if cutlass.const_expr(not shares_stage(step, self.cluster)):
                pipes.kv_ready.producer_commit(use)
            elif present:
                own = kv_stage(tiles, pipes, use) + halves_of_cta(self.cluster)[0] * HALF_BYTES
                hand_over(pipes.kv_ready.barrier(use), own, STAGE_COLUMNS // BOX_COLUMNS, peer_shift(pipes.kv_ready.base))
            else:
                pipes.kv_ready.producer_commit(use)
        if not present:
            # behind the stages, which rope_ready must tell of, too
            pipes.rope_landed.consumer_wait(tile)
            pipes.rope_ready.producer_commit(tile)

    @cute.jit
    def deliver_rope(self, pipes: CopyPipes, tile: Int32):
        """Wait rope_landed. Signal rope_ready."""
        pipes.rope_landed.consumer_wait(tile)
        cute.arch.fence_proxy("async.shared", space="cta")
        pipes.rope_ready.producer_commit(tile)


def shares_stage(step: int, cluster: int) -> bool:
    """Return whether each CTA of a pair copies half of a stage of a tile. The others are wanted too soon for a second way."""
    return cluster > 1 and step < SHARED_STAGES


def told_of_keys(tiles: Tiles, pipes: CopyPipes, tile: Int32) -> Boolean:
    """Wait valid_ready of a tile. Return whether it has any key."""
    pipes.valid_ready.consumer_wait(tile)
    return has_keys(tiles, pipes.valid_ready.stage(tile))


def kv_stage(tiles: Tiles, pipes: CopyPipes, use: Int32) -> Int32:
    """Return the shared memory address of the stage of a use."""
    return tiles.sKv.iterator.toint() + pipes.kv_ready.stage(use) * STAGE_BYTES


def build(config: SparsePrefillConfig, arch: Arch) -> KernelDefinition:
    """Return the variant, ready to compile."""
    kernel = SparsePrefillSm90(config, arch)
    return kernel.definition(
        smem_bytes=kernel.smem.nbytes,
        barriers=kernel.smem.barriers(),
        named_barriers=named_barriers(),
        roles=GATHER_ROLES + role_table("gather")[1:],
        expected={"HGMMA": kernel.geometry.wgmma_per_tile},
    )
