"""Rows of keys beyond 2³¹ elements and bytes, as in a cache of all layers or one that is mapped from the host."""

from __future__ import annotations

import pytest
import torch

import cute_mla
from cute_mla.cache import dequantise_cache, quantise_cache
from cute_mla.reference import attention
from cute_mla.spec.arch import Arch

ROWS, SCALE = 7_500_000, 0.07
# Of which 3,728,270 is the first beyond 2³¹ elements of 576 columns, and 3,273,603 the first beyond 2³¹ bytes of 656.
CHOSEN = [[ROWS - 1, 3, 3_728_270, 3_728_271, 3_273_603, 6_547_207], [0, 3_273_602, 3_728_269, 7_000_000, 5, 6]]


@pytest.mark.parametrize("packed", [False, True], ids=["576 columns", "656 bytes"])
def test_sparse_attention_reads_rows_anywhere(arch: Arch, packed: bool) -> None:
    """Sparse prefill and decode by indices. The cache is not filled but for the chosen rows, so that it takes no memory."""
    draw = torch.Generator().manual_seed(0)
    rows = torch.tensor(CHOSEN)
    keys = torch.randn(rows.numel(), 1, 1, 576, generator=draw).bfloat16()
    written = quantise_cache(keys, "fp8_656") if packed else keys
    worth = (dequantise_cache(written, "fp8_656") if packed else keys).float().view(*rows.shape, 576)
    cache = torch.empty(ROWS, 1, 1, written.shape[-1], dtype=written.dtype)
    cache[rows.flatten()] = written
    q = torch.randn(2, 8, 576, generator=draw).bfloat16()
    slots = torch.nn.functional.pad(rows.to(torch.int32), (0, 128 - rows.shape[1]), value=-1).unsqueeze(1)
    with cute_mla.simulate(arch, 6):
        plan = cute_mla.get_mla_metadata(torch.zeros(2, dtype=torch.int32), 8, 1, 8, packed, 128)
        out, _ = cute_mla.flash_mla_with_kvcache(
            q[:, None], cache, None, None, 512, *plan, softmax_scale=SCALE, is_fp8_kvcache=packed, indices=slots
        )
        found = [out[:, 0]] if packed else [out[:, 0], cute_mla.flash_mla_sparse_fwd(q, cache[:, 0], slots, SCALE, 512)[0]]
    seen = torch.ones(1, rows.shape[1], dtype=torch.bool)
    wanted = torch.stack(
        [attention(q[i, :, None].float(), worth[i][None], worth[i][None, :, :512], SCALE, seen)[0][:, 0] for i in range(2)]
    )
    for result in found:
        torch.testing.assert_close(result.float(), wanted, rtol=1e-2, atol=1e-2)
