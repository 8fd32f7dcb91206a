"""The table of models: cells against the sizes of each model by hand, and against what is_supported answers."""

from __future__ import annotations

import json
from typing import Any

import pytest
from click.testing import CliRunner

import cute_mla.api
from cute_mla.cli import commands, served_models
from cute_mla.cli.served_models import HEADS, MODELS
from cute_mla.layer import MlaConfig
from tests.layer.dsa_models import V3_2
from tests.layer.mla_models import GLM_5, GLM_5_3_FLASH, MISTRAL_SMALL_4, V2_LITE, V3

ROWS = {cells[0]: dict(zip(HEADS, cells, strict=True)) for cells in served_models.served_models()}


@pytest.mark.parametrize(
    ("model", "cells"),
    [
        ("DeepSeek-V2-Lite", ("16", "512 + 64", "q, k 192; v 128", "`latent`, `fp8_576`", "–", "with gradients", "–", "yes")),
        ("DeepSeek-V4.1", ("64", "512, of them 64 rotary", "–", "–", "`v41`, `v41_paged`; beside `v41` also `v41_fp4`", "–", "yes")),
        ("GLM-4.7-Flash", ("20", "512 + 64", "q, k 256; v 256", "`latent`, `fp8_576`", "–", "with gradients", "–", "yes")),
        ("GLM-5.3-Flash", ("64", "512 + 0", "q, k 256; v 256", "`latent_512`", "`nope_528`", "with gradients", "yes")),
        ("Mistral Small 4", ("32", "256 + 64", "q, k 128; v 128", "`latent_320`", "–", "with gradients", "–", "yes")),
        (
            "DeepSeek-V3.2",
            ("128", "512 + 64", "q, k 192; v 128", "`latent`", "`latent`, `fp8_656`", "with gradients", "yes", "yes, with indexer"),
        ),
    ],
)
def test_rows(model: str, cells: tuple[str, ...]) -> None:
    assert tuple(ROWS[model].values())[1 : 1 + len(cells)] == cells


def test_a_model_that_is_not_served_says_why() -> None:
    row = ROWS["MiniCPM3"]
    assert row["dense decode"] == "not served: head_dim is 288; supported: 576, 512, 320, 1088"
    assert row["prefill"].startswith("not served: head_dim is 96; supported: 192")
    assert row["layer"] == "not served: kv_lora_rank is 256 with qk_rope_head_dim 32"
    assert ROWS["A.X-K2-Light"]["layer"] == "not served: model_type is 'axk2': A.X-K2 has keys of 128 + 32 columns, which no kernel reads"
    assert {ROWS[f"Mistral Large 4, {layers} of 72 layers"]["layer"] for layers in (18, 54)} == {"yes, with indexer"}
    assert [ROWS[f"dots3-note, {layers} of 46 layers"]["layer"] for layers in (13, 33)] == ["yes, with indexer", "yes"]
    assert {ROWS[name]["layer"] for name in ("Kimi K3", "Kimi Linear", "LongCat Flash", "Ling 3", "A.X-K1", "Youtu")} == {"yes"}
    assert ROWS["Hy4"]["layer"] == "yes, with indexer"
    assert (
        sum("not served" in cell for row in ROWS.values() for cell in row.values()) == 11
    )  # five of A.X-K2, three of MiniCPM3, one of wide dots3 layers, two of keys that are values


@pytest.mark.parametrize(
    ("model", "config"),
    [
        ("DeepSeek-V3, V3.1, R1", V3),
        ("DeepSeek-V2-Lite", V2_LITE),
        ("GLM-5, 5.1, 5.2", GLM_5),
        ("GLM-5.3-Flash", GLM_5_3_FLASH),
        ("DeepSeek-V3.2", V3_2),
        ("Mistral Small 4", MISTRAL_SMALL_4),
    ],
)
def test_sizes_are_those_of_the_configurations(model: str, config: dict[str, Any]) -> None:
    (own,) = (known for known in MODELS if known.name == model)
    for name in ("num_attention_heads", "kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"):
        assert getattr(own, name) == config[name]
    assert own.topk == config.get("index_topk")
    assert own.d_qk == MlaConfig.from_hugging_face(config).key_columns


@pytest.mark.parametrize(
    ("op", "features", "column"),
    [
        ("dense_decode", {"head_dim": 320}, "dense decode"),
        ("dense_prefill", {"head_dim": 128}, "prefill"),
        ("dense_prefill_backward", {"head_dim": 128}, "prefill"),
    ],
)
def test_cells_follow_is_supported(monkeypatch: pytest.MonkeyPatch, op: str, features: dict[str, int], column: str) -> None:
    """Refused once, such a call is not served in the table either, and no other cell changes."""
    ask = cute_mla.api.is_supported

    def refuse(asked: str, arch: str, **given: Any) -> tuple[bool, str]:
        refused = asked == op and features.items() <= given.items()
        return (False, "planted") if refused else ask(asked, arch, **given)

    monkeypatch.setattr(cute_mla.api, "is_supported", refuse)
    changed = {
        (cells[0], head)
        for cells in served_models.served_models()
        for head, cell in zip(HEADS, cells, strict=True)
        if cell != ROWS[cells[0]][head]
    }
    names = ("Mistral Small 4", "Mistral Large 4, 54 of 72 layers", "Mistral Large 4, 18 of 72 layers")
    models = names[: 3 if features["head_dim"] == 128 else 1]  # keys of Large have 576 columns, or 512
    assert changed == {(model, column) for model in models}


def test_the_command_prints_the_table() -> None:
    assert CliRunner().invoke(commands, ["show", "models"]).output == served_models.markdown()
    found = json.loads(CliRunner().invoke(commands, ["show", "models", "--json"]).output)
    assert found == {"models": list(ROWS.values())}
