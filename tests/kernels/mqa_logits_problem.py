"""Launches of a logits kernel over memory laid out byte by byte, and what they must write."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from cute_mla import simulator
from cute_mla.simulator import Swizzle, TensorMap
from cute_mla.spec.mqa_logits import COLUMNS, ROW_BYTES, TILE_KEYS, MqaLogitsArguments, MqaLogitsProblem
from tests.kernels.launching import CompiledKernel, launch, nbytes

UNTOUCHED = -7.5
E4M3 = torch.float8_e4m3fn
NAN_BYTE = 0x7F


@dataclass(frozen=True)
class Call:
    """One call. windows: (ks, ke) of each token; lengths: context_lens, [requests] or [requests][tokens]; one of them.

    page_size: 0 without pages. room: columns of logits, default as many as keys. sms: of the device.
    chunk: tiles of an item, default as the host chooses. dead: a request whose first page is none of the cache's.
    """

    heads: int = 64
    windows: tuple[tuple[int, int], ...] = ()
    keys: int = 0
    lengths: tuple[int | tuple[int, ...], ...] = ()
    tokens: int = 1
    page_size: int = 0
    room: int | None = None
    clean: bool = True
    relative: bool = False
    sms: int = 2
    chunk: int | None = None
    dead: int | None = None
    seed: int = 3

    @property
    def paged(self) -> bool:
        """Return whether the keys lie in pages."""
        return self.page_size > 0


class Memory:
    """Operands of a call, with NaN in every byte that must not matter."""

    def __init__(self, call: Call) -> None:
        self.call = call
        draw = torch.Generator().manual_seed(call.seed)
        self.count = len(call.lengths) * call.tokens if call.paged else len(call.windows)
        self.keys = self._most_keys() if call.paged else call.keys
        self.columns = self.keys if call.room is None else call.room
        if call.paged:
            self.keys = min(self.keys, self.columns)
        # rows of q and weights are wider than their heads; what lies beside them is NaN
        self.q_bytes = torch.full((self.count, call.heads + 1, COLUMNS), NAN_BYTE, dtype=torch.uint8)
        self.q_bytes[:, : call.heads] = (torch.randn(self.count, call.heads, COLUMNS, generator=draw) * 2).to(E4M3).view(torch.uint8)
        self.weights = torch.full((self.count, call.heads + 3), float("nan"))
        self.weights[:, : call.heads] = torch.randn(self.count, call.heads, generator=draw)
        self.lengths = torch.tensor(call.lengths, dtype=torch.int32)
        self._lay_out_keys(draw)
        self.stride = -(-self.columns // 4) * 4 + 4
        self.logits = torch.full((self.count, self.stride), UNTOUCHED)

    def _most_keys(self) -> int:
        """Return what the block table holds: the longest request, and one page more."""
        most = max(max(row) if isinstance(row, tuple) else row for row in self.call.lengths)
        return (max(-(-most // self.call.page_size), 1) + 1) * self.call.page_size

    def seen(self, token: int) -> tuple[int, int]:
        """Return (first key, key behind the last) that a token sees."""
        call = self.call
        if not call.paged:
            begin, end = (min(max(key, 0), call.keys) for key in call.windows[token])
            return begin, max(begin, min(end, begin + self.columns if call.relative else self.columns))
        request, j = divmod(token, call.tokens)
        row = call.lengths[request]
        if isinstance(row, tuple):
            return 0, min(max(row[j], 0), self.keys)
        return 0, max(min(max(row, 0), self.keys) - call.tokens + 1 + j, 0)

    def _lay_out_keys(self, draw: torch.Generator) -> None:
        call = self.call
        if not call.paged:
            self.k_bytes = torch.full((self.keys + 1, COLUMNS), NAN_BYTE, dtype=torch.uint8)
            self.scales = torch.full((self.keys + 1,), float("nan"))
            used = torch.zeros(self.keys + 1, dtype=torch.bool)
            for token in range(self.count):
                begin, end = self.seen(token)
                used[begin:end] = True
            self.k_bytes[used] = self._values(int(used.sum()), draw)
            self.scales[used] = self._factors(int(used.sum()), draw)
            return
        size, entries = call.page_size, -(-self._most_keys() // call.page_size)
        requests = len(call.lengths)
        self.pages = requests * entries + 2
        self.page_stride = size * ROW_BYTES + 32
        self.cache = torch.full((self.pages, self.page_stride), 0xFF, dtype=torch.uint8)
        order = torch.randperm(self.pages - 1, generator=draw)[: requests * entries].reshape(requests, entries).to(torch.int32)
        self.table = torch.full((requests, entries), 1 << 30, dtype=torch.int32)  # unless overwritten: entries that must not be read
        for request in range(requests):
            last = max(self.seen(request * call.tokens + j)[1] for j in range(call.tokens))
            for entry in range(-(-last // size)):
                page = int(order[request, entry])
                self.table[request, entry] = page
                rows = min(last - entry * size, size)
                self.cache[page, : rows * COLUMNS] = self._values(rows, draw).reshape(-1)
                scales = self._factors(rows, draw).view(torch.uint8).reshape(-1)
                self.cache[page, size * COLUMNS : size * COLUMNS + 4 * rows] = scales
        if call.dead is not None:
            self.table[call.dead, 0] = self.pages if call.dead % 2 else -3

    def _values(self, rows: int, draw: torch.Generator) -> torch.Tensor:
        return torch.randn(rows, COLUMNS, generator=draw).to(E4M3).view(torch.uint8)

    def _factors(self, rows: int, draw: torch.Generator) -> torch.Tensor:
        return torch.rand(rows, generator=draw) + 0.5

    def keys_of(self, token: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return values, fp64 (keys, 128), and scales of the keys that a token sees."""
        begin, end = self.seen(token)
        if not self.call.paged:
            return self.k_bytes[begin:end].view(E4M3).double(), self.scales[begin:end].double()
        size, values, scales = self.call.page_size, [], []
        for entry in range(-(-end // size)):
            page = int(self.table[token // self.call.tokens, entry])
            there = 0 <= page < self.pages
            bytes_of = self.cache[page] if there else torch.zeros(self.page_stride, dtype=torch.uint8)
            values.append(bytes_of[: size * COLUMNS].reshape(size, COLUMNS))
            scales.append(bytes_of[size * COLUMNS : size * ROW_BYTES].clone().view(torch.float32))
        if not values:
            return torch.zeros(0, COLUMNS, dtype=torch.float64), torch.zeros(0, dtype=torch.float64)
        return torch.cat(values)[:end].contiguous().view(E4M3).double(), torch.cat(scales)[:end].double()

    def expected(self) -> torch.Tensor:
        """Return the logits in fp64, -inf and UNTOUCHED where nothing is seen."""
        call = self.call
        result = torch.full((self.count, self.stride), UNTOUCHED, dtype=torch.float64)
        if call.clean:
            result[:, : self.columns] = -float("inf")
        for token in range(self.count):
            begin, end = self.seen(token)
            values, scales = self.keys_of(token)
            q = self.q_bytes[token, : call.heads].view(E4M3).double()
            logits = scales * (self.weights[token, : call.heads].double() @ torch.relu(q @ values.T))
            first = 0 if call.relative else begin
            result[token, first : first + end - begin] = logits
        return result

    def arguments(self) -> tuple[MqaLogitsArguments, MqaLogitsProblem]:
        """Return the launch arguments and the problem."""
        call = self.call
        requests, tokens = (len(call.lengths), call.tokens) if call.paged else (1, self.count)
        problem = MqaLogitsProblem(call.paged, call.heads, requests, tokens, self.keys)
        config = problem.config
        q_map = TensorMap(
            "u8",
            self.q_bytes.data_ptr(),
            (COLUMNS, call.heads, self.count),
            (COLUMNS, self.q_bytes.stride(0)),
            (COLUMNS, config.head_tile, config.block_tokens),
            Swizzle.B128,
        )
        if call.paged:
            dims, box = (COLUMNS, call.page_size, self.pages), (COLUMNS, call.page_size, 1)
            k_map = TensorMap("u8", self.cache.data_ptr(), dims, (COLUMNS, self.page_stride), box, Swizzle.B128)
            first: int | torch.Tensor = 0
            table: int | torch.Tensor = self.table
            ends, scales = self.lengths, self.cache.data_ptr() + call.page_size * COLUMNS
        else:
            k_map = TensorMap("u8", self.k_bytes.data_ptr(), (COLUMNS, self.keys), (COLUMNS,), (COLUMNS, TILE_KEYS), Swizzle.B128)
            bounds = torch.tensor(call.windows, dtype=torch.int64).clamp(-(1 << 31), (1 << 31) - 1).to(torch.int32)
            self.first, self.ends = bounds[:, 0].contiguous(), bounds[:, 1].contiguous()
            first, ends, table, scales = self.first, self.ends, 0, self.scales.data_ptr()
        args = MqaLogitsArguments(
            q_map=q_map,
            k_map=k_map,
            weights=self.weights,
            scales=scales,
            first_keys=first,
            end_keys=ends,
            block_table=table,
            logits=self.logits,
            weights_stride_token=self.weights.stride(0),
            scales_stride_page=self.page_stride if call.paged else 0,
            table_stride=self.table.stride(0) if call.paged else 0,
            logits_stride_token=self.stride,
            tokens=self.count,
            heads=call.heads,
            tokens_per_request=tokens if call.paged else 1,
            keys=self.keys,
            columns=self.columns,
            page_size=call.page_size,
            pages=self.pages if call.paged else 0,
            chunk=call.chunk or problem.chunk(call.sms),
            length_per_token=int(self.lengths.dim() == 2),
            relative=int(call.relative),
            clean=int(call.clean),
        )
        return args, problem


def run(kernel: CompiledKernel, call: Call, policy: simulator.Policy) -> list[str]:
    """Launch the kernel; return what is wrong: findings, and logits that are not the formula's."""
    operands = Memory(call)
    args, problem = operands.arguments()
    memory = simulator.GlobalMemory()
    memory.add("q", operands.q_bytes.data_ptr(), nbytes(operands.q_bytes), writable=False)
    memory.add("weights", operands.weights.data_ptr(), nbytes(operands.weights), writable=False)
    if call.paged:
        memory.add("cache", operands.cache.data_ptr(), nbytes(operands.cache), writable=False)
        memory.add("lengths", operands.lengths.data_ptr(), nbytes(operands.lengths), writable=False)
        memory.add("table", operands.table.data_ptr(), nbytes(operands.table), writable=False)
    else:
        memory.add("keys", operands.k_bytes.data_ptr(), COLUMNS * operands.keys, writable=False)
        memory.add("scales", operands.scales.data_ptr(), 4 * operands.keys, writable=False)
        memory.add("ks", operands.first.data_ptr(), nbytes(operands.first), writable=False)
        memory.add("ke", operands.ends.data_ptr(), nbytes(operands.ends), writable=False)
    memory.add("logits", operands.logits.data_ptr(), nbytes(operands.logits))
    findings = launch(kernel, problem.grid(call.sms), list(args), memory, policy)
    return [*map(str, findings), *mistakes(operands)]


def mistakes(operands: Memory) -> list[str]:
    """Return how the logits differ from the formula."""
    expected, logits = operands.expected(), operands.logits.double()
    fixed = (expected == UNTOUCHED) | expected.isinf()
    wrong = torch.where(fixed, logits != expected, ~((logits - expected).abs() <= 2e-4 + 1e-5 * expected.abs()))
    if not wrong.any():
        return []
    token, column = (int(i) for i in wrong.nonzero()[0])
    return [f"{int(wrong.sum())} logits, the first ({token}, {column}): {logits[token, column]} is not {expected[token, column]}"]
