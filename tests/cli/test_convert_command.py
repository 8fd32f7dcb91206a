"""The command convert: what it writes, prints and returns."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner, Result

from cute_mla.cli import commands
from tests.convert.models import LLAMA, TOKENS, random_weights, read_checkpoint, write_checkpoint

GQA = {**LLAMA, "num_attention_heads": 4, "num_key_value_heads": 2}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    np.save(tmp_path / "ids.npy", TOKENS.numpy())
    return write_checkpoint(tmp_path / "in", GQA, random_weights(GQA), torch.float16)


def run(*arguments: object) -> Result:
    return CliRunner().invoke(commands, ["convert", *map(str, arguments)])


def test_a_conversion(source: Path, tmp_path: Path) -> None:
    out, report = tmp_path / "out", tmp_path / "report.json"
    calibration = ("--calibration", tmp_path / "ids.npy", "--sequences", 1, "--length", 50)
    result = run(source, out, "--rank", 200, "--dtype", "bf16", "--fold", 1, *calibration, "--json", report)
    assert result.exit_code == 0, result.output
    assert "transmla, rank 200, bfloat16, 50 calibration tokens" in result.stdout
    assert "cache of a token and layer: 256 columns before, 320 after" in result.stdout
    assert [line[:6] for line in result.stderr.splitlines()] == ["[1/2] ", "[2/2] "]
    assert json.loads(report.read_text()) == json.loads((out / "conversion.json").read_text())
    assert read_checkpoint(out)[0]["kv_lora_rank"] == 256


def test_mha2mla(source: Path, tmp_path: Path) -> None:
    result = run(source, tmp_path / "out", "--method", "mha2mla", "--strategy", "2-norm", "--svd", "split", "--dtype", "fp32")
    assert result.exit_code == 0, result.output
    assert "Fine-tune the result" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--rank", "513"), "rank is 513; supported: an integer, 1 to 512"),
        (("--method", "transmlaa"), "did you mean transmla?"),
        (("--strategy", "high"), "strategy is 'high' with method 'transmla'"),
        (("--calibration", "nowhere"), "File 'nowhere' does not exist"),
        (("--json", "nowhere/report.json"), "--json: cannot write nowhere/report.json"),
    ],
)
def test_wrong_usage(arguments: tuple[str, ...], message: str, source: Path, tmp_path: Path) -> None:
    result = run(source, tmp_path / "out", *arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "the checkpoint is in fp16, where the scale 2^-32 of the latent underflows"),
        (("--dtype", "bf16", "--fold", "3"), "fold is 3 with head_dim 64; supported: 1, 2, 4"),
        (("--dtype", "bf16", "--method", "mha2mla", "--strategy", "low"), "strategy is 'low' with 2 KV heads"),
        (("--dtype", "bf16", "--calibration", "IN/config.json"), "tokenizer"),
    ],
)
def test_what_cannot_be_converted(arguments: tuple[str, ...], message: str, source: Path, tmp_path: Path) -> None:
    """One line on stderr, exit code 1, and no traceback."""
    result = run(source, tmp_path / "out", *(word.replace("IN", str(source)) for word in arguments))
    assert result.exit_code == 1
    assert isinstance(result.exception, SystemExit)
    assert message in result.stderr
    assert result.stderr.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_the_input_stays(source: Path) -> None:
    result = run(source, source, "--dtype", "bf16")
    assert result.exit_code == 1
    assert "is the input" in result.stderr
    assert read_checkpoint(source)[0] == GQA


def test_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    result = run(tmp_path / "in", tmp_path / "out")
    assert result.exit_code == 1
    assert f"{tmp_path / 'in' / 'config.json'}: No such file or directory" in result.stderr
