"""Report of a conversion: what each layer lost, whether the result is exact, and what to expect of it, in words and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ..spec.mla import D_ROPE
from .options import ConvertOptions
from .source import SourceConfig

_HEAVY = 0.9  # share of the columns of the cache whose loss the published conversions did not survive without fine-tuning


@dataclass(frozen=True)
class LayerReport:
    """Losses of a layer.

    kept_rotary_energy: share of the energy of scores whose keys keep a rotary embedding, 0 to 1; where frequencies are folded, some of it
    at a neighbouring frequency. rank_loss: share of the energy of keys and values that the rank drops, 0 to 1. Losses below rounding
    count as none. fold: neighbouring frequencies that are treated as one. exact: nothing was lost but rounding.
    """

    kept_rotary_energy: float
    rank_loss: float
    fold: int
    exact: bool


@dataclass(frozen=True)
class ConversionReport:
    """Losses of a conversion, and advice.

    dtype: of the converted weights. calibration_tokens: 0 without calibration. cache_columns: columns of a token's keys and values in the
    cache of a layer, before and after.
    """

    options: ConvertOptions
    dtype: str
    calibration_tokens: int
    cache_columns: tuple[int, int]
    layers: Sequence[LayerReport]
    notes: Sequence[str]

    @staticmethod
    def of(config: SourceConfig, options: ConvertOptions, layers: Sequence[LayerReport], tokens: int, dtype: str) -> ConversionReport:
        """Return the report of the conversion of a model with these losses by layer."""
        before = 2 * config.num_key_value_heads * config.head_dim
        columns = (before, options.latent + D_ROPE)
        return ConversionReport(options, dtype, tokens, columns, tuple(layers), tuple(_notes(config, options, tokens)))

    @property
    def exact(self) -> bool:
        """Return whether no layer lost anything but rounding."""
        return all(layer.exact for layer in self.layers)

    @property
    def expectation(self) -> str:
        """Return a sentence on what to expect of the converted model without fine-tuning."""
        before, after = self.cache_columns
        if self.exact:
            return "The conversion is exact: the logits differ from the original's by rounding alone."
        if self.options.method == "mha2mla":
            return (
                "Fine-tune the result: MHA2MLA drops rotation and rank without compensation, and its authors train on 0.3 to 1 % of the "
                "tokens of pre-training."
            )
        if 1 - after / before >= _HEAVY:
            return (
                f"Fine-tune the result: {1 - after / before:.0%} of the cache is gone. Llama-2-7B lost as much, and its published "
                "conversion has a perplexity of 41.6 instead of 5.5."
            )
        return (
            "Expect a higher perplexity, typically by 10 to 40 % where some tenths of the rotary energy or some hundredths of the rank are "
            "lost; measure it on text of your own. Fine-tuning recovers most of it."
        )

    def words(self) -> str:
        """Return the report as text."""
        energy, loss = [layer.kept_rotary_energy for layer in self.layers], [layer.rank_loss for layer in self.layers]
        folds = sorted({layer.fold for layer in self.layers})
        exact = sum(layer.exact for layer in self.layers)
        before, after = self.cache_columns
        lines = [
            f"{self.options.method}, rank {self.options.rank}, {self.dtype}, {self.calibration_tokens} calibration tokens",
            f"cache of a token and layer: {before} columns before, {after} after",
            f"kept rotary energy of {len(self.layers)} layers: mean {sum(energy) / len(energy):.4f}, least {min(energy):.4f}",
            f"loss by the rank: mean {sum(loss) / len(loss):.2e}, most {max(loss):.2e}",
            f"frequencies folded: {', '.join(map(str, folds))}; exact layers: {exact} of {len(self.layers)}",
            *self.notes,
            self.expectation,
        ]
        return "".join(f"{line}\n" for line in lines)

    def to_json(self) -> dict[str, Any]:
        """Return the report as a value that JSON can hold."""
        return {
            "exact": self.exact,
            "expectation": self.expectation,
            "notes": list(self.notes),
            "options": asdict(self.options),
            "dtype": self.dtype,
            "calibration_tokens": self.calibration_tokens,
            "cache_columns": {"before": self.cache_columns[0], "after": self.cache_columns[1]},
            "layers": [asdict(layer) for layer in self.layers],
        }


def _notes(config: SourceConfig, options: ConvertOptions, tokens: int) -> list[str]:
    """Return what a user of the checkpoint must know."""
    notes = []
    if not tokens and options.method == "transmla":
        notes.append("Without calibration, all inputs of attention count alike. A calibration text loses less.")
    if config.rms_norm_eps != 1e-6:
        notes.append(f"rms_norm_eps was {config.rms_norm_eps:g} and is 1e-06; the hidden states are scaled to make up for it.")
    if config.biases:
        notes.append("The model has biases: transformers and cute_mla.layer run it, engines without attention_bias for DeepSeek do not.")
    if config.rope_scaling is not None:
        notes.append("rope_type is llama3: transformers and cute_mla.layer compute it; vLLM takes every type for YaRN and would be wrong.")
    return notes
