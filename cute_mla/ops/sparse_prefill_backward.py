"""The backward of sparse prefill: what each token adds to the rows that it has chosen, and the sum of that over the tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..runtime.device import Device
from ..spec.dense_decode import TILE_ROWS
from ..spec.mla import ELEMENT_BYTES
from ..spec.sparse_prefill_dkv import SparsePrefillDkvArguments, config_for, tiles
from ..spec.split_plan import TILE_KEYS
from ..spec.tensor_map import Swizzle, TensorMap
from .key_lists import IndexedKeys
from .tensor_spec import DTYPE_NAMES

BOX_COLUMNS = 64


@dataclass(frozen=True)
class ScoreGradients:
    """P / sm_scale and dS of a chunk of tokens, bf16 [tokens, tiles, h_q, 64], as spec/sparse_prefill_dkv.py takes them."""

    probs: torch.Tensor
    dscores: torch.Tensor

    @staticmethod
    def empty(device: Device, q: torch.Tensor, tokens: int, topk: int) -> ScoreGradients:
        """Allocate them beside q [batch, s_q, h_q, d_qk]."""
        probs, dscores = (q.new_empty(tokens, tiles(topk), q.shape[2], TILE_KEYS) for _ in range(2))
        device.mark_uninitialized(probs, dscores)
        return ScoreGradients(probs, dscores)

    def maps(self) -> tuple[TensorMap, TensorMap]:
        """Return their tensor maps."""
        return head_map(self.probs.flatten(0, 1)), head_map(self.dscores.flatten(0, 1))


def head_map(tensor: torch.Tensor) -> TensorMap:
    """Return a map of a tensor [.., heads, columns], with boxes of 64 columns of 64 heads. Strides are multiples of 16 bytes."""
    dims = tuple(reversed(tensor.shape))
    strides = tuple(
        stride * ELEMENT_BYTES if size > 1 else TILE_ROWS * ELEMENT_BYTES
        for size, stride in zip(dims[1:], reversed(tensor.stride()[:-1]), strict=True)
    )
    box = (BOX_COLUMNS, TILE_ROWS, *(1 for _ in dims[2:]))
    return TensorMap(DTYPE_NAMES[tensor.dtype], tensor.data_ptr(), dims, strides, box, Swizzle.B128)


def launch_rows(
    device: Device, call: IndexedKeys, chunk: tuple[int, int], queries: tuple[torch.Tensor, torch.Tensor], gradients: ScoreGradients
) -> torch.Tensor:
    """Launch sparse_prefill_dkv over a chunk of tokens. Return its rows, bf16 [tokens * topk, d_qk].

    queries: q [batch, s_q, h_q, d_qk] and dout [batch, s_q, h_q, 512], whose rows TMA can load.
    """
    (first, tokens), q = chunk, queries[0]
    h_q, d_qk = q.shape[2:]
    rows = q.new_empty(tokens * call.topk, d_qk)
    device.mark_uninitialized(rows)
    config = config_for(d_qk, h_q)
    strides = call.indices.stride()
    args = SparsePrefillDkvArguments(
        *(head_map(tensor) for tensor in queries),
        *gradients.maps(),
        *(call.indices, call.topk_length, call.kv_offsets, rows, strides[0], strides[1], first, tokens, q.shape[1]),
        *(call.s_kv, call.topk, tiles(call.topk)),
    )
    device.launch(device.kernel("sparse_prefill_dkv", config.name), config.grid(tokens, device.sm_count), args, pdl=True)
    return rows
