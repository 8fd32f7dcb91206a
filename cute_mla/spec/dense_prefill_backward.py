"""Backward pass of dense prefill: two kernels, dense_prefill_dq and then dense_prefill_dkdv, and the workspace between them.

With P = exp(softmax_scale q k^T - lse), dS = P (dout v^T - delta) and delta = rowsum(out dout):

    dq = softmax_scale dS k        dk = softmax_scale dS^T q        dv = P^T dout

summed over the query heads of a KV head in dk and dv. dq leaves lse * log2(e) and delta of each query row in the workspace, fp32; rows
whose lse is infinite leave +inf and 0. Where rows of q or dout are not aligned for a tensor map, it also leaves copies of them. A work
item of dq is one of dense prefill. One of dkdv is KEY_ROWS keys of one KV head of one sequence, with all rows that see them.
"""

from __future__ import annotations

from dataclasses import dataclass

from .arch import SM90, Arch
from .dense_decode import MAX_ROW_ALIGNMENT
from .dense_prefill import D_V, HEAD_DIMS, TILE_ROWS
from .mla import DTYPES, ELEMENT_BYTES, ceil_div

KEY_ROWS = 128  # keys of one work item of dkdv
_ROW_PADDING = 32  # rows of fp32: statistics of every head begin at a multiple of 128 bytes
_FLOAT_BYTES = 4


@dataclass(frozen=True)
class BackwardConfig:
    """One compiled variant of either kernel.

    dtype: element type of all operands but lse. d_qk: columns of q and k. access_bytes: 16: rows of q, dout, out and dq (dq), or of dk
    and dv (dkdv), begin at multiples of it; 2: at any element.
    """

    dtype: str
    d_qk: int
    access_bytes: int

    cluster = 1  # CTAs do not work together

    @property
    def name(self) -> str:
        """The kernel's name in the manifest, without op and arch."""
        return f"{self.dtype}_d{self.d_qk}" + ("_elements" if self.access_bytes == ELEMENT_BYTES else "")


@dataclass(frozen=True)
class BackwardWorkspace:
    """Layout of the workspace: its parts one behind the other.

    copied_columns: columns of q if q and dout are copied, else 0.
    """

    total_q: int
    h_q: int
    copied_columns: int = 0

    @property
    def padded_q(self) -> int:
        """Rows of a head in lse_log2 and delta."""
        return ceil_div(self.total_q, _ROW_PADDING) * _ROW_PADDING

    @property
    def parts(self) -> dict[str, int]:
        """Bytes of lse_log2 and delta, fp32 [h_q, padded_q], and of copies of q and dout, [total_q, h_q, columns]."""
        statistics = self.h_q * self.padded_q * _FLOAT_BYTES
        columns = {"q": self.copied_columns, "dout": D_V} if self.copied_columns else {}
        copies = {name: self.total_q * self.h_q * width * ELEMENT_BYTES for name, width in columns.items()}
        return {"lse_log2": statistics, "delta": statistics, **copies}

    @property
    def nbytes(self) -> int:
        """Bytes of all parts."""
        return sum(self.parts.values())


@dataclass(frozen=True)
class DensePrefillBackwardProblem:
    """The shapes of one call. They decide, with the architecture, on variants and grids.

    max_seqlen_q, max_seqlen_k: query rows and keys of the longest sequence. row_alignment: of q, dout, out and dq, key_alignment: of dk
    and dv, as in DenseDecodeProblem.
    """

    arch: Arch
    dtype: str
    d_qk: int
    batch: int
    h_q: int
    h_kv: int
    max_seqlen_q: int
    max_seqlen_k: int
    row_alignment: int = MAX_ROW_ALIGNMENT
    key_alignment: int = MAX_ROW_ALIGNMENT

    @property
    def has_maps(self) -> bool:
        """Whether q and dout come by tensor maps; else dq copies them."""
        return self.row_alignment % MAX_ROW_ALIGNMENT == 0

    @property
    def dq_config(self) -> BackwardConfig:
        """The variant of dq that serves this problem."""
        return self._config(self.row_alignment)

    @property
    def config(self) -> BackwardConfig:
        """The variant of dkdv that serves this problem."""
        return self._config(self.key_alignment)

    @property
    def configs(self) -> dict[str, BackwardConfig]:
        """The variants by op of the build."""
        return {"dense_prefill_dq": self.dq_config, "dense_prefill_dkdv": self.config}

    def _config(self, alignment: int) -> BackwardConfig:
        wide = alignment % MAX_ROW_ALIGNMENT == 0
        return BackwardConfig(self.dtype, self.d_qk, MAX_ROW_ALIGNMENT if wide else ELEMENT_BYTES)

    @property
    def row_blocks(self) -> int:
        """Blocks of query rows that a sequence may have."""
        return ceil_div(self.max_seqlen_q, TILE_ROWS[self.arch.name])

    @property
    def key_blocks(self) -> int:
        """Blocks of keys that a sequence may have."""
        return ceil_div(self.max_seqlen_k, KEY_ROWS)

    @property
    def row_items(self) -> int:
        """Work items of dq, including those of blocks that a sequence may not have."""
        return self.row_blocks * self.batch * self.h_q

    @property
    def key_items(self) -> int:
        """Work items of dkdv, likewise."""
        return self.key_blocks * self.batch * self.h_kv

    def dq_grid(self, sm_count: int) -> tuple[int, int, int]:
        """Return one CTA per SM, or per item if there are fewer items."""
        return min(self.row_items, sm_count), 1, 1

    def dkdv_grid(self, sm_count: int) -> tuple[int, int, int]:
        """Return one CTA per SM, or per item if there are fewer items."""
        return min(self.key_items, sm_count), 1, 1

    def workspace(self, total_q: int) -> BackwardWorkspace:
        """Return the layout of the workspace of a call with so many query rows."""
        return BackwardWorkspace(total_q, self.h_q, 0 if self.has_maps else self.d_qk)


def closed_variants(arch: Arch) -> tuple[BackwardConfig, ...]:
    """Return every variant of either kernel that ships for an architecture."""
    if arch is not SM90:
        return ()
    accesses = (MAX_ROW_ALIGNMENT, ELEMENT_BYTES)
    return tuple(BackwardConfig(dtype, d_qk, access) for dtype in DTYPES for d_qk in HEAD_DIMS for access in accesses)
