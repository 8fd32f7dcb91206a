"""One call of dense prefill on the simulator: operands with NaN around everything, and the reference in fp32."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from launching import CompiledKernel, launch, nbytes

from cute_mla import simulator
from cute_mla.spec.dense_prefill import BOX_COLUMNS, BOX_ROWS, D_V, TILE_ROWS, DensePrefillConfig
from cute_mla.spec.mla import ceil_div
from cute_mla.spec.tensor_map import Swizzle, TensorMap

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
HALF_ULP = {"bf16": 2.0**-8, "fp16": 2.0**-11}  # relative to the value, at worst
SPARE_ROWS = 40  # of NaN behind the last sequence, within the tensors
CANARY = 7.0


@dataclass
class Problem:
    """Sequences of (s_q, s_k). odd: q and out begin at odd elements, with rows of odd length.

    The rows of q and of k, v behind the last sequence are NaN."""

    lengths: list[tuple[int, int]]
    arch: str
    causal: bool = True
    h_kv: int = 1
    group: int = 1
    config: DensePrefillConfig = field(default_factory=lambda: DensePrefillConfig("bf16", 192, 16))
    empty_lse: float = math.inf
    scale_log2: float = 0.12
    spread: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        draw = torch.Generator().manual_seed(self.seed)
        self.h_q = self.h_kv * self.group
        self.starts_q = [sum(q for q, _ in self.lengths[:r]) for r in range(len(self.lengths) + 1)]
        self.starts_k = [sum(k for _, k in self.lengths[:r]) for r in range(len(self.lengths) + 1)]
        self.total_q, self.total_k = self.starts_q[-1] + SPARE_ROWS, self.starts_k[-1] + SPARE_ROWS
        odd = int(self.config.access_bytes < 16)
        dtype = DTYPES[self.config.dtype]

        def drawn(rows: int, used: int, heads: int, columns: int, pad: int) -> torch.Tensor:
            storage = torch.full((pad + rows * heads * (columns + pad),), math.nan, dtype=dtype)
            view = storage[pad:].view(rows, heads, columns + pad)[..., :columns]
            view[:used] = (torch.randn(used, heads, columns, generator=draw) * self.spread).to(dtype)
            return view

        self.q = drawn(self.total_q, self.starts_q[-1], self.h_q, self.config.d_qk, odd)
        self.k = drawn(self.total_k, self.starts_k[-1], self.h_kv, self.config.d_qk, 0)
        self.v = drawn(self.total_k, self.starts_k[-1], self.h_kv, D_V, 0)
        self.out = drawn(self.total_q, 0, self.h_q, D_V, odd)
        self.out.fill_(CANARY)
        self.lse = torch.full((self.total_q, self.h_q), CANARY)
        self.cu_q, self.cu_k = (torch.tensor(starts, dtype=torch.int32) for starts in (self.starts_q, self.starts_k))

    def _map(self, tensor: torch.Tensor) -> TensorMap:
        rows, heads, columns = tensor.shape
        strides = (tensor.stride(1) * 2, tensor.stride(0) * 2)
        box = (BOX_COLUMNS, 1, BOX_ROWS)
        return TensorMap(self.config.dtype, tensor.data_ptr(), (columns, heads, rows), strides, box, Swizzle.B128)

    def memory(self) -> simulator.GlobalMemory:
        """What the kernel may touch."""
        memory = simulator.GlobalMemory()
        for name in ("q", "k", "v", "cu_q", "cu_k"):
            tensor = getattr(self, name)
            size = tensor.untyped_storage().nbytes()
            memory.add(name, tensor.untyped_storage().data_ptr(), size, writable=False)
        memory.add("out", self.out.untyped_storage().data_ptr(), self.out.untyped_storage().nbytes())
        memory.add("lse", self.lse.data_ptr(), nbytes(self.lse))
        return memory

    def run(self, kernel: CompiledKernel, ctas: int = 1, policy: simulator.Policy | None = None) -> list[simulator.Finding]:
        """Launches the kernel; returns the findings."""
        maps = [self._map(tensor) for tensor in (self.q if self.config.access_bytes == 16 else self.k, self.k, self.v)]
        row_blocks = ceil_div(max(q for q, _ in self.lengths), TILE_ROWS[self.arch])
        strides = [stride for tensor in (self.q, self.out, self.lse) for stride in tensor.stride()[:2]]
        scalars = [len(self.lengths), self.h_q, self.group, self.total_q, self.total_k, row_blocks, int(self.causal)]
        pointers = [self.q, self.cu_q, self.cu_k, self.out, self.lse]
        args = [*maps, *pointers, *strides, self.scale_log2, self.empty_lse, *scalars]
        return launch(kernel, (ctas, 1, 1), args, self.memory(), policy)

    def expected(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(out, the error that rounding of probabilities and result explains, lse) in fp32, canaries where nothing may be written."""
        out, lse = torch.full((self.total_q, self.h_q, D_V), CANARY), torch.full((self.total_q, self.h_q), CANARY)
        bound = torch.zeros_like(out)
        for r, (s_q, s_k) in enumerate(self.lengths):
            rows, keys = slice(self.starts_q[r], self.starts_q[r + 1]), slice(self.starts_k[r], self.starts_k[r + 1])
            k, v = (tensor[keys].float().repeat_interleave(self.group, 1) for tensor in (self.k, self.v))
            scores = torch.einsum("qhd,khd->hqk", self.q[rows].float(), k) * (self.scale_log2 * math.log(2))
            if self.causal:
                hidden = torch.arange(s_k)[None, :] > torch.arange(s_q)[:, None] + (s_k - s_q)
                scores = scores.masked_fill(hidden, -math.inf)
            row_lse = torch.logsumexp(scores, -1)
            probs = torch.softmax(scores, -1).nan_to_num(0.0)
            out[rows] = torch.einsum("hqk,khd->qhd", probs, v)
            bound[rows] = torch.einsum("hqk,khd->qhd", probs, v.abs()) * 2 * HALF_ULP[self.config.dtype] + 1e-5
            lse[rows] = torch.where(row_lse > -math.inf, row_lse, torch.tensor(self.empty_lse)).T
        return out, bound, lse

    def faults(self, kernel: CompiledKernel, ctas: int = 1, policy: simulator.Policy | None = None) -> list[str]:
        """Runs the kernel; what is wrong with it."""
        faults = [str(finding) for finding in self.run(kernel, ctas, policy)]
        out, bound, lse = self.expected()
        off = ~((self.out.float() - out).abs() <= bound)  # NaN is off too
        if off.any():
            faults.append(f"out is off in {int(off.sum())} of {off.numel()} elements, first at {off.nonzero()[0].tolist()}")
        off = ~((self.lse == lse) | ((self.lse - lse).abs() <= 1e-6 + 1e-5 * lse.abs()))
        if off.any():
            faults.append(f"lse is off in {int(off.sum())} of {off.numel()} rows, first at {off.nonzero()[0].tolist()}")
        return faults
