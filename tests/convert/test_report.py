"""Report of a conversion: what it advises, and what it warns of."""

from __future__ import annotations

from typing import Any

import pytest

from cute_mla.convert import ConversionReport, ConvertOptions, LayerReport
from cute_mla.convert.source import SourceConfig
from tests.convert.models import LLAMA, LLAMA3_ROPE, QWEN2

EXACT, ROTARY, RANK = LayerReport(1.0, 0.0, 1, True), LayerReport(0.97, 0.0, 2, False), LayerReport(0.97, 0.02, 2, False)
GQA = {**LLAMA, "num_attention_heads": 8, "num_key_value_heads": 4}
MHA = {**LLAMA, "head_dim": 128, "num_attention_heads": 32, "num_key_value_heads": 32}


@pytest.mark.parametrize(
    ("config", "options", "layers", "expected"),
    [
        (GQA, ConvertOptions(), [EXACT, EXACT], "The conversion is exact"),
        (GQA, ConvertOptions(), [EXACT, ROTARY], "Expect a higher perplexity"),
        (GQA, ConvertOptions(), [EXACT, RANK], "Expect a clearly higher perplexity"),
        (MHA, ConvertOptions(), [RANK, RANK], "Fine-tune the result: 93% of the cache is gone"),
        (GQA, ConvertOptions(method="mha2mla"), [ROTARY, EXACT], "Fine-tune the result: MHA2MLA drops"),
    ],
)
def test_the_expectation(config: dict[str, Any], options: ConvertOptions, layers: list[LayerReport], expected: str) -> None:
    report = ConversionReport.of(SourceConfig.from_hugging_face(config), options, layers, 9, "bfloat16")
    assert report.expectation.startswith(expected)
    assert report.words().endswith(f"{report.expectation}\n")
    assert report.exact == all(layer is EXACT for layer in layers)


@pytest.mark.parametrize(
    ("config", "tokens", "note"),
    [
        (LLAMA, 0, "Without calibration, all inputs of attention count alike."),
        ({**LLAMA, "rms_norm_eps": 1e-5}, 9, "rms_norm_eps was 1e-05 and is 1e-06"),
        (QWEN2, 9, "engines without attention_bias for DeepSeek do not"),
        ({**LLAMA, "rope_scaling": LLAMA3_ROPE}, 9, "vLLM takes every type for YaRN"),
    ],
)
def test_notes(config: dict[str, Any], tokens: int, note: str) -> None:
    report = ConversionReport.of(SourceConfig.from_hugging_face(config), ConvertOptions(), [EXACT], tokens, "bfloat16")
    assert len(report.notes) == 1
    assert note in report.notes[0]
    assert report.notes[0] in report.words()


def test_the_words() -> None:
    report = ConversionReport.of(SourceConfig.from_hugging_face(GQA), ConvertOptions(rank=200), [EXACT, RANK], 9, "bfloat16")
    assert report.words().splitlines()[:5] == [
        "transmla, rank 200, bfloat16, 9 calibration tokens",
        "cache of a token and layer: 512 columns before, 320 after",
        "kept rotary energy of 2 layers: mean 0.9850, least 0.9700",
        "loss by the rank: mean 1.00e-02, most 2.00e-02",
        "frequencies folded: 1, 2; exact layers: 1 of 2",
    ]
