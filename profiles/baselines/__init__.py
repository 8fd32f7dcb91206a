"""Other libraries that are timed beside ours, each optional: one module and one entry of BASELINES a library."""

from __future__ import annotations

from torch.nn.attention import SDPBackend

from .baseline import Baseline
from .flash_attention import FlashAttention4
from .flash_attention_3 import FlashAttention3
from .flash_mla import FlashMla
from .sdpa import Sdpa

BASELINES: tuple[Baseline, ...] = (
    FlashMla(),
    FlashAttention3(),
    FlashAttention4(),
    Sdpa("cuDNN", SDPBackend.CUDNN_ATTENTION, padded=False),
    Sdpa("SDPA flash", SDPBackend.FLASH_ATTENTION, padded=True),
)
