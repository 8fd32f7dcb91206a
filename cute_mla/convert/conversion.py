"""Conversion of a checkpoint, one layer at a time: in memory are a layer, its conversion, and the hidden states of the calibration."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor

from .. import __version__
from ..layer.config import MlaConfig
from .calibration import Calibration
from .options import ConvertOptions
from .partial_folder import PartialFolder, check_paths
from .report import ConversionReport, LayerReport
from .rotation import check_fold, check_strategy
from .source import SourceCheckpoint, SourceConfig
from .target import convert_layer, convert_outer, converted_shapes, target_config

Progress = Callable[[int, int, LayerReport], None]

_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
_LEAST_TOLERANCE = 1e-24  # of energies, what the linear algebra in fp64 leaves
# Files beside the weights that the converted model needs too
_COPIED = ("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab*", "merges.txt", "chat_template*", "generation_config.json")


def convert_checkpoint(
    source: str | Path,
    out: str | Path,
    options: ConvertOptions | None = None,
    *,
    calibration: Tensor | None = None,
    progress: Progress | None = None,
) -> ConversionReport:
    """Convert the checkpoint of a Llama or Qwen2 style model to a DeepSeek-V3 checkpoint.

    source: folder with config.json and safetensors files; it is only read
    out: folder to make. The files are written to `out`.partial, which gets its name when everything is complete. A conversion that was
    interrupted goes on there if it is called again with the same arguments
    options: default ConvertOptions(), TransMLA with rank 512
    calibration: token ids, int64 [sequences, tokens], on which the loss is to be small. None: all inputs of attention count alike
    progress: called with the layer, the number of layers, and the report of each layer that is complete

    Returns the report, which is also in `out` as conversion.json and conversion.txt. Raises ValueError if the model, its weights, the
    options or the tokens cannot be used, OSError if a file cannot be read or written, ModuleNotFoundError without safetensors.
    """
    source, out, options = Path(source), Path(out), options or ConvertOptions()
    check_paths(source, out)
    checkpoint = SourceCheckpoint.open(source)
    config = checkpoint.config
    dtype = _target_dtype(checkpoint, options)
    if options.method == "transmla":
        check_fold(options.fold, config)
    else:
        check_strategy(config, options.strategy)
    target = target_config(config, options, dtype)
    MlaConfig.from_hugging_face(target)
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = PartialFolder(out, config.num_hidden_layers)
    partial.check_space(_weight_bytes(config, options, dtype))
    calibrated = None if calibration is None else Calibration(checkpoint, calibration)
    with partial.opened(_fingerprint(checkpoint, options, calibration)):
        layers = _convert_layers(checkpoint, options, calibrated, partial, dtype, progress)
        report = ConversionReport.of(config, options, layers, 0 if calibration is None else calibration.numel(), target["dtype"])
        for file in sorted({file for pattern in _COPIED for file in source.glob(pattern) if file.is_file()}):
            partial.copy(file)
        partial.finish(convert_outer(checkpoint.outer(), config), dtype, target, report)
    return report


def _convert_layers(
    checkpoint: SourceCheckpoint,
    options: ConvertOptions,
    calibration: Calibration | None,
    partial: PartialFolder,
    dtype: torch.dtype,
    progress: Progress | None,
) -> list[LayerReport]:
    """Convert the layers that are not complete yet, and take all through the calibration."""
    tolerance = max(torch.finfo(checkpoint.dtype).eps ** 2, _LEAST_TOLERANCE)
    reports = []
    for index in range(partial.layers):
        report = partial.finished(index)
        layer = checkpoint.layer(index) if report is None or calibration is not None else {}
        if report is None:
            moment = None if calibration is None else calibration.moment(layer)
            weights, report = convert_layer(layer, checkpoint.config, options, moment, tolerance)
            partial.write_layer(index, weights, dtype, report)
        if calibration is not None:
            calibration.advance(layer)
        reports.append(report)
        if progress is not None:
            progress(index, partial.layers, report)
    return reports


def _target_dtype(checkpoint: SourceCheckpoint, options: ConvertOptions) -> torch.dtype:
    """Return the dtype of the converted weights. Raise ValueError for fp16."""
    dtype = checkpoint.dtype if options.dtype == "source" else _DTYPES[options.dtype]
    if dtype == torch.float16:
        raise ValueError("the checkpoint is in fp16, where the scale 2^-32 of the latent underflows; supported: dtype 'bf16' or 'fp32'")
    return dtype


def _weight_bytes(config: SourceConfig, options: ConvertOptions, dtype: torch.dtype) -> int:
    """Return the size of the converted weights."""
    by_layer = sum(math.prod(shape) for shape in converted_shapes(config, options.latent).values())
    outer = sum(math.prod(shape) for shape in config.outer_shapes().values())
    return (by_layer * config.num_hidden_layers + outer) * dtype.itemsize


def _fingerprint(checkpoint: SourceCheckpoint, options: ConvertOptions, calibration: Tensor | None) -> str:
    """Return a hash of all that a conversion depends on. Files of weights count by size and time."""
    config = (checkpoint.folder / "config.json").read_bytes()
    files = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in checkpoint.files]
    digest = hashlib.sha256(json.dumps([__version__, asdict(options), files, str(checkpoint.folder.resolve())]).encode() + config)
    if calibration is not None:
        digest.update(f"{list(calibration.shape)}".encode() + calibration.to(torch.int64).contiguous().numpy().tobytes())
    return digest.hexdigest()
