"""Conversion of Llama and Qwen2 style checkpoints to plain DeepSeek-V3 checkpoints, by TransMLA or by MHA2MLA.

source reads and checks the checkpoint, calibration runs it over tokens and sums the moments of the inputs of attention. rotation chooses
what keeps its rotary embedding, low_rank factorises the rest of the keys and the values, target lays out the matrices, partial_folder
writes them, report says what was lost. conversion ties them together, one layer at a time.
"""

from .calibration import read_tokens
from .conversion import convert_checkpoint
from .options import ConvertOptions
from .report import ConversionReport, LayerReport

__all__ = ["ConversionReport", "ConvertOptions", "LayerReport", "convert_checkpoint", "read_tokens"]
