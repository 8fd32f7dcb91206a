"""Other libraries that are timed beside ours, each optional. A file of its own here for each, and a line below."""

from __future__ import annotations

from torch.nn.attention import SDPBackend

from .flash_attention import FlashAttention4
from .flash_mla import FlashMla
from .peer import Peer
from .sdpa import Sdpa
from .triton_decode import TritonDecode

PEERS: tuple[Peer, ...] = (
    FlashMla(),
    FlashAttention4(),
    Sdpa("cuDNN", SDPBackend.CUDNN_ATTENTION, padded=False),
    Sdpa("SDPA flash", SDPBackend.FLASH_ATTENTION, padded=True),
    TritonDecode(),
)
