"""A dense decode call, for tests that change one argument of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

import cute_mla


@dataclass
class Call:
    """Operands of one call, with defaults for everything."""

    batch: int = 2
    s_q: int = 1
    h_q: int = 64
    h_kv: int = 1
    page_size: int = 64
    pages_per_request: int = 8
    pages: int = 20
    dtype: torch.dtype = torch.bfloat16
    options: dict[str, Any] = field(default_factory=dict)
    plan: Any = None

    def __post_init__(self) -> None:
        self.q = torch.zeros(self.batch, self.s_q, self.h_q, 576, dtype=self.dtype)
        self.k_cache = torch.zeros(self.pages, self.page_size, self.h_kv, 576, dtype=self.dtype)
        self.block_table = torch.zeros(self.batch, self.pages_per_request, dtype=torch.int32)
        self.cache_seqlens = torch.zeros(self.batch, dtype=torch.int32)
        self.head_dim_v = 512

    def run(self, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Call flash_mla_with_kvcache."""
        metadata, num_splits = cute_mla.get_mla_metadata() if self.plan is None else self.plan
        return cute_mla.flash_mla_with_kvcache(
            self.q,
            self.k_cache,
            self.block_table,
            self.cache_seqlens,
            self.head_dim_v,
            metadata,
            num_splits,
            **{**self.options, **options},
        )

    @property
    def rows_per_kv_head(self) -> int:
        return self.s_q * self.h_q // self.h_kv

    def form_a(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a plan made beforehand."""
        return cute_mla.get_mla_metadata(self.cache_seqlens, self.rows_per_kv_head, self.h_kv, self.h_q)
