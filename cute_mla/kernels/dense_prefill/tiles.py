"""Tiles of K and V of the kernels that take them one by one: SM90 and SM120."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from cutlass import Int32

from ...spec.arch import Arch
from ...spec.dense_prefill import DensePrefillConfig
from ...spec.mla import ELEMENT_BYTES
from .operands import ITEM_WORDS

LOAD_REGISTERS = 40  # a lane; all threads start with 168
COMPUTE_REGISTERS = 232
SEARCH_REGISTERS = (56, 224)  # the same, where the role that finds items also looks for their visible tiles


@dataclass(frozen=True)
class DensePrefillTiles:
    """Numbers of a variant. item_words: of an item in the queue."""

    arch: ClassVar[Arch]

    config: DensePrefillConfig
    item_words: int = ITEM_WORDS

    @property
    def registers(self) -> tuple[int, int]:
        """Return the registers of a lane of the warps that load and find items, and of those that compute."""
        return SEARCH_REGISTERS if self.item_words > ITEM_WORDS else (LOAD_REGISTERS, COMPUTE_REGISTERS)

    @property
    def tile_keys(self) -> int:
        """Return the keys of a tile."""
        return self.config.tile_keys(self.arch)

    @property
    def box_keys(self) -> int:
        """Return the keys of a TMA box."""
        return self.config.key_box_rows(self.arch)

    def key_tiles(self, keys: Int32) -> Int32:
        """Return the tiles of that many keys."""
        return (keys + (self.tile_keys - 1)) // self.tile_keys

    @property
    def key_bytes(self) -> int:
        """Return the bytes of one tile of K."""
        return self.tile_keys * self.config.d_qk * ELEMENT_BYTES

    @property
    def value_bytes(self) -> int:
        """Return the bytes of one tile of V."""
        return self.tile_keys * self.config.d_v * ELEMENT_BYTES
