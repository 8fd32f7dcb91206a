"""A sparse decode call, for tests that change one argument of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

import cute_mla
from cute_mla.cache import empty_cache
from cute_mla.spec.cache_format import FORMATS
from cute_mla.testing.cases.paged_cache import named_format


@dataclass
class SparseCall:
    """Operands of one call, with defaults for everything. cache: the name of a format. extra_topk: None for one cache."""

    cache: str = "fp8_656"
    batch: int = 2
    s_q: int = 1
    h_q: int = 64
    topk: int = 128
    extra_topk: int | None = None
    pages: int = 20
    page_size: int = 64
    extra_page_size: int = 2
    dtype: torch.dtype = torch.bfloat16
    plan: Any = None

    def __post_init__(self) -> None:
        self.q = torch.zeros(self.batch, self.s_q, self.h_q, FORMATS[self.cache].d_qk, dtype=self.dtype)
        self.k_cache = self.make_cache(self.page_size)
        self.options: dict[str, Any] = {"indices": self.make_indices(self.topk), "is_fp8_kvcache": self.cache != "latent"}
        name = named_format(FORMATS[self.cache])
        if name is not None:
            self.options["kv_format"] = name
        if self.extra_topk is not None:
            self.options["extra_k_cache"] = self.make_cache(self.extra_page_size)
            if name is not None:
                self.options["extra_kv_format"] = name
            self.options["extra_indices_in_kvcache"] = self.make_indices(self.extra_topk)

    def make_cache(self, page_size: int) -> torch.Tensor:
        if self.cache == "latent":
            return torch.zeros(self.pages, page_size, 1, 576, dtype=self.dtype)
        stride = -(-FORMATS[self.cache].page_bytes(page_size) // 16) * 16
        return empty_cache(self.cache, self.pages, page_size, page_stride=stride)

    def make_indices(self, topk: int) -> torch.Tensor:
        return torch.zeros(self.batch, self.s_q, topk, dtype=torch.int32)

    def lengths(self) -> torch.Tensor:
        return torch.zeros(self.batch, dtype=torch.int32)

    def run(self, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Call flash_mla_with_kvcache."""
        metadata, num_splits = cute_mla.get_mla_metadata() if self.plan is None else self.plan
        given = {"q": self.q, "k_cache": self.k_cache, "block_table": None, "cache_seqlens": None, "head_dim_v": 512}
        return cute_mla.flash_mla_with_kvcache(
            **{**given, "tile_scheduler_metadata": metadata, "num_splits": num_splits, **self.options, **options}
        )

    def form_a(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a plan made beforehand."""
        return cute_mla.get_mla_metadata(self.lengths(), self.s_q * self.h_q, 1, self.h_q, True, self.topk + (self.extra_topk or 0))
