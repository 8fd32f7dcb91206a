"""Fields and properties that the cases of several ops share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from itertools import accumulate
from typing import Any, ClassVar, Literal, Protocol

import torch

from ...spec.arch import Arch
from ...spec.dense_decode import MAX_ROW_ALIGNMENT, TILINGS
from ...spec.kernel_ops import ARCHS_OF
from ...spec.mla import D_V
from ...spec.split_plan import INVARIANT_SPLIT_TILES, TILE_KEYS

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}

Values = Literal["normal", "rising", "falling", "peaks", "opposed", "steps", "needles"]
CausalValues = Literal[Values, "cliff"]  # of ops with a causal mask
QLayout = Literal["packed", "sliced", "even", "heads_first", "far_requests", "far_tokens", "far_heads"]
Outputs = Literal["allocated", "given", "strided", "even", "odd", "far_requests", "far_tokens", "far_heads"]
Metadata = Literal["tensors", "object", "stale", "longer", "overwritten"]
Tags = dict[str, Callable[[Any], str]]

EVEN_ELEMENTS = 2  # alignment of the rows of q or out in the layout "even"; rows of all other layouts have the largest alignment

# The tag in a case's id for each field that is not part of the shape, when the field is not at its default.
TAGS: Tags = {
    "values": str,
    "q_layout": lambda layout: f"q_{layout}",
    "cache_layout": lambda layout: f"kv_{layout}",
    "outputs": lambda outputs: f"out_{outputs}",
    "metadata": lambda metadata: f"{metadata.removesuffix('s')}_plan",
    "softmax_scale": lambda scale: f"scale{scale:g}",
    "batch_invariant": lambda _: "invariant",
    "empty_lse": lambda value: f"empty{value:g}",
    "sm_count": lambda count: f"sm{count}",
    "seed": lambda seed: f"seed{seed}",
}

# Those of a decode call.
DECODE_TAGS: Tags = {**TAGS, "tokens": lambda tokens: f"tokens{'_'.join(map(str, tokens))}"}


class Config(Protocol):
    """A compiled variant of a kernel."""

    @property
    def name(self) -> str:
        """Return the kernel's name in the manifest, without op and architecture."""


class Problem(Protocol):
    """The shapes of a call."""

    @property
    def config(self) -> Config:
        """Return the variant that serves the call."""


@dataclass(frozen=True)
class BaseCase:
    """One call of any op.

    q_layout: "sliced": a 16-byte aligned slice of a larger tensor; "even": rows two elements longer than d_qk, aligned to two elements,
        on architectures that take them; "heads_first": a transposed
        [h_q, b, s_q, d_qk], as the absorption matmul of an engine leaves q; one of FAR_DIMENSIONS: the last request, query token or
        head lies FAR_ELEMENTS or more from the first.
    outputs: "allocated": the call allocates its results; "given": the caller passes results and workspace; "strided": like "given",
        but out is a 16-byte aligned slice and the other results are slices; "even": like "strided", but rows of out are d_v + 2
        elements apart; "odd": rows aligned to one element, of results that may have such; one of FAR_DIMENSIONS: like "given", with every
        result far in this dimension.
    sm_count: streaming multiprocessors of the simulated device, None for the default board; a GPU has its own.
    cut_by: the field that a suite lowers to make a case cheaper. d_v: columns of out.
    """

    op: ClassVar[str]
    tags: ClassVar[Tags] = TAGS
    cut_by: ClassVar[str]
    d_v: ClassVar[int] = D_V

    dtype: str = "bf16"
    q_layout: QLayout = "packed"
    outputs: Outputs = "allocated"
    softmax_scale: float | None = None
    empty_lse: float | None = None
    sm_count: int | None = None
    seed: int = 0

    @property
    def id(self) -> str:
        """Return a short unique name: the shape, then a tag for every other field that is not at its default."""
        defaults = {field.name: field.default for field in fields(self)}
        unusual = ((name, tag) for name, tag in self.tags.items() if name in defaults and getattr(self, name) != defaults[name])
        return "-".join([self.shape_id, *(tag(getattr(self, name)) for name, tag in unusual)])

    @property
    def shape_id(self) -> str:
        """Return the first part of the id."""
        raise NotImplementedError

    @property
    def q_shape(self) -> tuple[int, int, int, int]:
        """Return the shape of q: requests, query tokens per request, query heads, columns."""
        raise NotImplementedError

    @property
    def scale(self) -> float:
        """Return the scale of the softmax, by default d_qk ** -0.5."""
        return self.q_shape[-1] ** -0.5 if self.softmax_scale is None else self.softmax_scale

    @property
    def tiles(self) -> int:
        """Return the cost on the simulated device: tiles of 64 query rows x 64 keys; rows without keys cost one key tile."""
        raise NotImplementedError

    @property
    def finding_kinds(self) -> frozenset[str]:
        """Return the kinds of findings that the simulated device must report: of operands that are meant to be wrong."""
        return frozenset()

    @property
    def results_defined(self) -> bool:
        """Return whether the results are known; of others the call must only end and access nothing but its operands."""
        return True

    @property
    def kernel_op(self) -> str:
        """Return the op of the kernel that a record names, of the variant that `problem` gives."""
        return self.op

    def problem(self, arch: Arch) -> Problem:
        """Return the shapes of the call."""
        raise NotImplementedError

    @property
    def q_dtype(self) -> torch.dtype:
        """Return the dtype of q."""
        return DTYPES[self.dtype]

    def row_bytes(self, arch: Arch) -> int:
        """Return the number of bytes at multiples of which the op's rows of q and out must begin."""
        return 1

    def runs_on(self, arch: Arch) -> bool:
        """Return whether an architecture has kernels of the op and takes the rows of q and out."""
        if arch not in ARCHS_OF[self.op]:
            return False
        least = min(
            EVEN_ELEMENTS * self.q_dtype.itemsize if self.q_layout == "even" else MAX_ROW_ALIGNMENT,
            EVEN_ELEMENTS * DTYPES[self.dtype].itemsize if self.outputs == "even" else MAX_ROW_ALIGNMENT,
        )
        return least % self.row_bytes(arch) == 0


@dataclass(frozen=True)
class BatchedCase(BaseCase):
    """One call whose requests have equally many query tokens.

    batch: requests; s_q: query tokens per request; h_q: query heads.
    """

    cut_by: ClassVar[str] = "batch"

    batch: int = 1
    s_q: int = 1
    h_q: int = 16

    @property
    def d_qk(self) -> int:
        """Return the columns of q."""
        raise NotImplementedError

    @property
    def q_shape(self) -> tuple[int, int, int, int]:
        """Return the shape of q: requests, query tokens per request, query heads, columns."""
        return self.batch, self.s_q, self.h_q, self.d_qk


SPARE_TOKENS = 3
LONGER_KEYS = 2 * INVARIANT_SPLIT_TILES * TILE_KEYS  # so many that the plan cuts behind the first keys of several splits


@dataclass(frozen=True)
class DecodeCase(BatchedCase):
    """One call of a decode op.

    tokens: query tokens of each request, None: s_q. If given, tokens are packed, max_seqlen_q is s_q or the most of a request, and
        behind the tokens of the requests there are SPARE_TOKENS of none, where the caller passes results.
    metadata: "tensors": get_mla_metadata gets the lengths and returns the plan's tensors; "stale": it gets other lengths, as if they had
        changed since: for dense decode those of the requests before, for sparse decode half the indices; "longer": as "stale" in dense
        decode, but one request had LONGER_KEYS more; "overwritten": other numbers are in the plan's tensors, so that results are undefined;
        "object": get_mla_metadata() returns a schedule that plans in its first call.
    """

    metadata: Metadata = "object"
    batch_invariant: bool = False
    tokens: tuple[int, ...] | None = None

    def row_bytes(self, arch: Arch) -> int:
        """Return the number of bytes at multiples of which rows of q and out must begin."""
        return TILINGS[arch.name].row_bytes

    @property
    def used_tokens(self) -> int:
        """Return the query tokens of all requests."""
        return self.batch * self.s_q if self.tokens is None else sum(self.tokens)

    @property
    def total_q(self) -> int | None:
        """Return the rows of packed query tokens, None without `tokens`."""
        return None if self.tokens is None else self.used_tokens + (0 if self.outputs == "allocated" else SPARE_TOKENS)

    @property
    def max_seqlen_q(self) -> int | None:
        """Return the argument of a call with packed query tokens, None without `tokens`."""
        return None if self.tokens is None else max(self.s_q, *self.tokens)

    @property
    def offsets(self) -> tuple[int, ...]:
        """Return the first packed query token of each request, and the end of the last request's."""
        return tuple(accumulate(self.tokens or (), initial=0))

    @property
    def q_shape(self) -> tuple[int, int, int, int]:
        """Return the shape of q: requests, query tokens per request, query heads, columns; of packed tokens (1, total_q, ..)."""
        return super().q_shape if self.total_q is None else (1, self.total_q, self.h_q, self.d_qk)

    @property
    def lse_shape(self) -> tuple[int, int, int]:
        """Return the shape of lse: requests, heads, tokens; of packed tokens (1, total_q, heads)."""
        return (self.batch, self.h_q, self.s_q) if self.total_q is None else (1, self.total_q, self.h_q)

    @property
    def table_rows(self) -> int:
        """Return the rows of the plan's table of units."""
        return 0

    @property
    def results_defined(self) -> bool:
        """Return whether the plan is one."""
        return self.metadata != "overwritten"
