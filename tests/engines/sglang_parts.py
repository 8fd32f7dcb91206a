"""Stand-ins for SGLang's modules: they have what the record has, and nothing else, so that an adapter that asks for more fails."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cute_mla.reference import attention
from tests.engines.sglang_interface import RECORDS

INTERFACES: list[dict[str, Any]] = [json.loads(path.read_text()) for path in sorted(RECORDS.glob("*.json"))]
INTERFACE = INTERFACES[-1]
MODULES: dict[str, dict[str, Any]] = INTERFACE["modules"]
ADAPTERS = tuple(f"cute_mla.engines.sglang.{name}" for name in ("dense", "sparse", "deepseek_v4", "dots3"))
HEADS = 16
SCALE = 192**-0.5


def members(module: str, name: str) -> dict[str, Any]:
    found: dict[str, Any] = MODULES[f"sglang.srt.{module}"][name]
    return found


class Recorded(SimpleNamespace):
    """An object that may have recorded members only."""

    def __init__(self, known: Any, **given: Any) -> None:
        assert not given.keys() - set(known), "the record does not have these"
        super().__init__(**given)


class Written:
    """KVWriteLoc.for_batch, whose result only set_kv_buffer looks into."""

    @classmethod
    def for_batch(cls, forward_batch: Any) -> Any:
        return forward_batch


class FlashMlaPlan(NamedTuple):
    """SGLang's record of a plan."""

    flashmla_metadata: Tensor
    num_splits: Tensor


class SparseBase:
    """Stand-in for SGLang's backend of sparse attention, of which a model runner says everything."""

    def __init__(self, model_runner: Any, skip_prefill: bool = False) -> None:
        known = members("layers.attention.dsa_backend", "DeepseekSparseAttnBackend")
        for name, value in model_runner.sparse.items():
            assert known[name] == "attribute"
            setattr(self, name, value)


class WindowBase:
    """Stand-in for SGLang's wrapper of FlashAttention around window layers of dots3-note."""

    def __init__(self, backend: Any) -> None:
        self.backend, self.token_to_kv_pool = backend, backend.token_to_kv_pool

    def init_forward_metadata(self, forward_batch: Any) -> None:
        self.backend.init_forward_metadata(forward_batch)

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        """Do nothing, as FlashAttention's backend."""

    def selected_backend(self, forward_batch: Any) -> Any:
        return self.backend

    def maybe_rebuild_metadata_after_dp_padding(self, forward_batch: Any) -> None:
        """Do nothing: metadata of tests fit their batches, or have rows too few."""


def padded_rows(planned: Tensor, added: Tensor) -> Tensor:
    """Return rows of metadata and those that pad a batch."""
    return torch.cat((planned, added[planned.shape[0] :].to(planned.dtype)))


def verify_mask(**fields: Any) -> Any:
    return Recorded(members("layers.attention.verify_mask", "VerifyMask"), **fields)


def mha_layer(columns: int, values: int, heads: int = HEADS) -> Any:
    known = members("layers.radix_attention", "RadixAttention")
    return Recorded(known, tp_q_head_num=heads, tp_k_head_num=heads, head_dim=columns, v_head_dim=values, scaling=SCALE, layer_id=0)


def plain(q: Tensor, k: Tensor, v: Tensor, first: int) -> tuple[Tensor, Tensor]:
    """Attention of tokens [tokens, heads, columns] over decompressed keys, the first of which is that of token `first`; and lse."""
    visible = torch.arange(len(k)) <= first + torch.arange(len(q))[:, None]
    mine, keys, values = (part.float().transpose(0, 1) for part in (q, k, v))
    out, lse = attention(mine, keys, values, SCALE, visible, -math.inf)
    return out.transpose(0, 1).flatten(1), lse.T
