"""Options of a conversion."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..ops.arguments import check_integer, is_number, short_repr
from ..spec.mla import D_LATENT, D_ROPE, LATENT_DIMS

METHODS = ("transmla", "mha2mla")
ROTATIONS = ("complex", "real")
STRATEGIES = ("2-norm", "high", "low", "uniform")
SVDS = ("joint", "split")
DTYPES = ("source", "bf16", "fp32")


@dataclass(frozen=True)
class ConvertOptions:
    """Method and parameters of a conversion.

    method: "transmla" (arXiv 2502.07864) mixes the key heads at each frequency and keeps the strongest component rotary. "mha2mla"
    (arXiv 2502.14837) leaves heads as they are and keeps some of their pairs rotary.
    rank: latent columns that are used, 1 to 512. Up to 256, the checkpoint has a kv_lora_rank of 256, else of 512.
    dtype: "bf16" or "fp32", or "source" for the dtype of the checkpoint that is read.

    TransMLA only:
    rotation: "complex" mixes pairs by a unitary matrix, with keys weighted by the energy of their queries. "real" mixes by an orthogonal
    matrix without weights, as published.
    fold: neighbouring frequencies that are treated as one. None: per layer, none where this is exact, else twice the fewest.
    attenuation: scores of a pair without its rotation are multiplied by 1 / (1 + (attenuation * frequency)^2), frequency in radians per
    position, because the rotation makes fast pairs cancel over distance. 0: not at all, as published.

    MHA2MLA only:
    strategy: pairs that stay rotary. svd: keys and values factorised together ("joint") or each with half of the rank ("split").
    """

    method: str = "transmla"
    rank: int = D_LATENT
    dtype: str = "source"
    rotation: str = "complex"
    fold: int | None = None
    attenuation: float = 4.0
    strategy: str = "2-norm"
    svd: str = "joint"

    def __post_init__(self) -> None:
        _check_choice("method", self.method, METHODS)
        check_integer("rank", self.rank, 1, D_LATENT)
        _check_choice("dtype", self.dtype, DTYPES)
        _check_choice("rotation", self.rotation, ROTATIONS)
        if self.fold is not None:
            check_integer("fold", self.fold, 1)
        if not is_number(self.attenuation) or not 0 <= float(self.attenuation) < math.inf:
            raise ValueError(f"attenuation is {short_repr(self.attenuation)}; supported: a number, 0 or more")
        _check_choice("strategy", self.strategy, STRATEGIES)
        _check_choice("svd", self.svd, SVDS)
        if self.method == "mha2mla" and self.svd == "split" and self.rank < 2:
            raise ValueError("rank is 1 with svd 'split'; supported: 2 or more, half of them for keys")
        self._check_others_untouched()

    @property
    def latent(self) -> int:
        """Return the smallest kv_lora_rank of the kernels that holds the rank."""
        return min(dims.latent for dims in LATENT_DIMS.values() if dims.rotary == D_ROPE and dims.latent >= self.rank)

    def _check_others_untouched(self) -> None:
        """Raise ValueError if an option of the other method is set."""
        others = ("strategy", "svd") if self.method == "transmla" else ("rotation", "fold", "attenuation")
        for name in others:
            default = type(self).__dataclass_fields__[name].default
            if getattr(self, name) != default:
                raise ValueError(f"{name} is {getattr(self, name)!r} with method {self.method!r}; supported with the other method only")


def _check_choice(name: str, value: Any, known: Sequence[str]) -> None:
    if value not in known:
        raise ValueError(f"{name} is {short_repr(value)}; supported: {', '.join(known)}")
