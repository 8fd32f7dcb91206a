"""Files that a conversion leaves: a whole folder or an incomplete one, from which the next run goes on."""

from __future__ import annotations

import errno
import json
import os
import shutil
import threading
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from cute_mla.convert import ConvertOptions, LayerReport, convert_checkpoint, partial_folder
from cute_mla.layer import MlaConfig
from tests.convert.models import LLAMA, TOKENS, random_weights, read_checkpoint, write_checkpoint

GQA: dict[str, Any] = {**LLAMA, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 3}


class StoppedError(Exception):
    """Interruption of a conversion."""


def stop_at(last: int) -> Any:
    def progress(layer: int, layers: int, report: LayerReport) -> None:
        if layer == last:
            raise StoppedError

    return progress


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = write_checkpoint(tmp_path / "source", GQA, random_weights(GQA), torch.float32)
    (folder / "tokenizer.json").write_text("{}")
    (folder / "generation_config.json").write_text("{}")
    (folder / "pytorch_model.bin").write_text("not needed")
    return folder


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_the_folder(source: Path, tmp_path: Path) -> None:
    before = files(source)
    report = convert_checkpoint(source, tmp_path / "deep" / "out", calibration=TOKENS)
    out = tmp_path / "deep" / "out"
    assert files(source) == before
    shards = [f"model-0000{index}-of-00004.safetensors" for index in (1, 2, 3, 4)]
    others = [
        "config.json",
        "conversion.json",
        "conversion.txt",
        "generation_config.json",
        "model.safetensors.index.json",
        "tokenizer.json",
    ]
    assert sorted(files(out)) == sorted([*shards, *others])
    config, weights = read_checkpoint(out)
    assert MlaConfig.from_hugging_face(config).kv_lora_rank == 512
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(weights)
    assert index["metadata"]["total_size"] == sum(weight.nbytes for weight in weights.values())
    assert {weight.dtype for weight in weights.values()} == {torch.float32}
    assert json.loads((out / "conversion.json").read_text()) == json.loads(json.dumps(report.to_json()))
    assert (out / "conversion.txt").read_text() == report.words()
    assert [asdict(layer) for layer in report.layers] == report.to_json()["layers"]


def test_a_rank_of_256_has_a_smaller_cache(source: Path, tmp_path: Path) -> None:
    report = convert_checkpoint(source, tmp_path / "out", ConvertOptions(rank=256, dtype="bf16"))
    config, weights = read_checkpoint(tmp_path / "out")
    assert MlaConfig.from_hugging_face(config).key_columns == 320
    assert weights["model.layers.2.self_attn.kv_b_proj.weight"].shape == (4 * 256, 256)
    assert report.cache_columns == (256, 320)
    assert {weight.dtype for weight in weights.values()} == {torch.bfloat16}


@pytest.mark.parametrize("calibration", [None, TOKENS], ids=["without", "calibrated"])
def test_an_interrupted_conversion_goes_on(
    calibration: torch.Tensor | None, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    convert_checkpoint(source, tmp_path / "whole", calibration=calibration)
    with pytest.raises(StoppedError):
        convert_checkpoint(source, tmp_path / "out", calibration=calibration, progress=stop_at(1))
    assert not (tmp_path / "out").exists()
    partial = tmp_path / "out.partial"
    assert not (partial / "config.json").exists()
    assert not (partial / "model.safetensors.index.json").exists()
    (partial / "layer-00001.json").unlink()  # as if it stopped between the weights and the report of a layer
    (partial / "model-00003-of-00004.safetensors.writing").write_text("cut off")
    written: list[str] = []
    write_file = partial_folder._write_file

    def recorded(path: Path, content: bytes) -> None:
        written.append(path.name)
        write_file(path, content)

    monkeypatch.setattr(partial_folder, "_write_file", recorded)
    done: list[int] = []
    convert_checkpoint(source, tmp_path / "out", calibration=calibration, progress=lambda layer, *_: done.append(layer))
    assert done == [0, 1, 2]
    assert [name for name in written if "safetensors" in name][:3] == [f"model-0000{index}-of-00004.safetensors" for index in (2, 3, 4)]
    assert files(tmp_path / "out") == files(tmp_path / "whole")
    assert not partial.exists()


@pytest.mark.parametrize("change", ["options", "weights", "calibration"])
def test_another_conversion_does_not_go_on(change: str, source: Path, tmp_path: Path) -> None:
    with pytest.raises(StoppedError):
        convert_checkpoint(source, tmp_path / "out", calibration=TOKENS, progress=stop_at(0))
    if change == "weights":
        shutil.copy(source / "model.safetensors", tmp_path / "copy")
        os.replace(tmp_path / "copy", source / "model.safetensors")  # noqa: PTH105
        os.utime(source / "model.safetensors", ns=(1, 1))
    options = ConvertOptions(rank=100) if change == "options" else None
    with pytest.raises(ValueError, match=r"out\.partial is from a conversion of other weights or with other options; .* delete it"):
        convert_checkpoint(source, tmp_path / "out", options, calibration=TOKENS.flip(0) if change == "calibration" else TOKENS)


def test_the_input_is_never_overwritten(source: Path, tmp_path: Path) -> None:
    before = files(source)
    (tmp_path / "link").symlink_to(source)
    for out in (source, source / "out", tmp_path, tmp_path / "link", tmp_path / "x" / ".." / "source"):
        with pytest.raises(ValueError, match=r"the output .* (is the input|exists)"):
            convert_checkpoint(source, out)
    (tmp_path / "out").mkdir()
    with pytest.raises(ValueError, match="out exists; supported: the name of a new folder"):
        convert_checkpoint(source, tmp_path / "out")
    assert files(source) == before


def test_two_at_a_time(source: Path, tmp_path: Path) -> None:
    inside, go_on = threading.Event(), threading.Event()

    def wait(*_: Any) -> None:
        inside.set()
        go_on.wait(60)

    first = threading.Thread(target=convert_checkpoint, args=(source, tmp_path / "out"), kwargs={"progress": wait})
    first.start()
    try:
        assert inside.wait(60)
        with pytest.raises(ValueError, match="another process converts into"):
            convert_checkpoint(source, tmp_path / "out")
    finally:
        go_on.set()
        first.join()
    assert (tmp_path / "out" / "config.json").is_file()


def test_too_little_space(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(1, 1, 1000))
    with pytest.raises(OSError, match=r"no space for the converted weights: 0\.01\d GB are needed, 0\.000 GB are free") as raised:
        convert_checkpoint(source, tmp_path / "out")
    assert raised.value.errno == errno.ENOSPC
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize("fails", ["model-00002-of-00004.safetensors", "layer-00002.json", "config.json"])
def test_a_disk_that_fills_up(fails: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is left that looks whole, and the next run goes on."""
    fsync = os.fsync

    def full(handle: int) -> None:
        if Path(f"/proc/self/fd/{handle}").readlink().name.startswith(fails):
            raise OSError(errno.ENOSPC, "No space left on device")
        fsync(handle)

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space left on device") as raised:
            convert_checkpoint(source, tmp_path / "out")
    assert Path(raised.value.filename).name == fails
    assert not (tmp_path / "out").exists()
    assert not list((tmp_path / "out.partial").glob("*.writing"))
    convert_checkpoint(source, tmp_path / "out")
    assert not (tmp_path / "out.partial").exists()
