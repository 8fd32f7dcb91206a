"""Online softmax whose probabilities go into the product as e4m3."""

from __future__ import annotations

from dataclasses import dataclass

from cutlass import Float8E4M3FN, Float32, Int32, cute

from ..parts.fragments import ROWS_PER_THREAD, quad_sum
from ..parts.softmax import OnlineSoftmax, follow_tile


@dataclass(frozen=True, kw_only=True)
class QuantisedSoftmax(OnlineSoftmax):
    """Its reference follows the maximum of every tile, up and down. rWeights: this thread's share of the sum of the rounded
    probabilities, which the output is divided by, so that rounding cannot change what the weights of a row add up to. The
    sum of the exact ones is for lse."""

    rWeights: cute.Tensor

    @staticmethod
    def of(scale_log2: Float32) -> QuantisedSoftmax:
        """State of a row that has seen nothing."""
        state = [cute.make_rmem_tensor(cute.make_layout(ROWS_PER_THREAD), Float32) for _ in range(4)]
        softmax = QuantisedSoftmax(scale_log2, *state[:3], rWeights=state[3])
        softmax.reset()
        return softmax

    def reset(self) -> None:
        """Forgets all keys."""
        super().reset()
        for row in range(ROWS_PER_THREAD):
            self.rWeights[row] = Float32(0)

    def follow(self, row: int, top: Float32) -> tuple[Float32, Float32]:
        """(a row's new reference, the factor for what was accumulated), from the scaled maximum of a tile."""
        return follow_tile(self.rMax[row], top, self.maximum(row))

    def add_rounded(self, words: list[list[Int32]], factors: list[Float32]) -> None:
        """Counts the probabilities of a tile as they go into the product, by row, after those before have been scaled."""
        for row in range(ROWS_PER_THREAD):
            rWords = cute.make_rmem_tensor(cute.make_layout(len(words[row])), Int32)
            for i, word in enumerate(words[row]):
                rWords[i] = word
            rounded = cute.make_rmem_tensor(cute.make_layout(4 * len(words[row])), Float32)
            rounded.store(cute.recast_tensor(rWords, Float8E4M3FN).load().to(Float32))
            total = self.rWeights[row] * factors[row]
            for i in range(cute.size(rounded)):
                total = total + rounded[i]
            self.rWeights[row] = total

    def weight_sum(self, row: int, total: Float32) -> Float32:
        """The sum of the rounded probabilities of all keys seen."""
        return quad_sum(self.rWeights[row])
