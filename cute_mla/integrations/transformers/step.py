"""Plan of one forward call: rows of the hidden states, pages and lengths, made once for all layers of a model."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from ...layer import MlaBatch, MlaConfig, plan_batch, plan_sequences
from .latent_cache import PAGE_SIZE, LatentCacheLayer


@dataclass(frozen=True)
class StepInputs:
    """Inputs of a forward call that all its layers share; the step of two calls is the same if these are.

    shape: batch and new tokens. attention_mask: bool [batch, cached and new tokens], False for padding; None without padding.
    position_ids: [batch or 1, new tokens], or None to count from the first key of each request. local_mask: whether attention_mask is that
    of the new tokens alone.
    """

    shape: tuple[int, int]
    device: torch.device
    attention_mask: torch.Tensor | None
    position_ids: torch.Tensor | None
    local_mask: bool = False

    def __post_init__(self) -> None:
        batch, tokens = self.shape
        mask, positions = self.attention_mask, self.position_ids
        if mask is not None and (mask.dim() != 2 or mask.shape[0] != batch):
            raise ValueError(f"attention_mask has shape {list(mask.shape)}; supported: [{batch}, cached and new tokens], False for padding")
        if positions is not None and (positions.dim() != 2 or positions.shape[0] not in (1, batch) or positions.shape[1] != tokens):
            raise ValueError(f"position_ids has shape {list(positions.shape)}; supported: [{batch} or 1, {tokens}]")

    def same_as(self, other: StepInputs) -> bool:
        """Return whether these are the same tensors, and equal otherwise."""
        tensors = self.attention_mask is other.attention_mask and self.position_ids is other.position_ids
        return tensors and (self.shape, self.device) == (other.shape, other.device)


@dataclass(frozen=True)
class Step:
    """Plan of a forward call.

    before: keys of each request ahead of the call, and its pages. new: tokens of each request that are no padding. rows: int64, the rows
    of the flattened hidden states that are no padding; None for all of them.
    """

    inputs: StepInputs
    before: tuple[tuple[int, ...], int]
    new: list[int]
    rows: torch.Tensor | None
    batch: MlaBatch


class Planner:
    """Plans of the forward calls of one model.

    first_layer: index of the layer that plans a call; the others take its plan. chunk_tokens: as in plan_batch.
    """

    def __init__(self, first_layer: int, chunk_tokens: int) -> None:
        self.first_layer = first_layer
        self.chunk_tokens = chunk_tokens
        self._step: Step | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of copies and files, which is without the last call's plan: its selection may hold tensors with a graph."""
        return {**vars(self), "_step": None}

    def step(self, inputs: StepInputs, layer_idx: int, cached: LatentCacheLayer | None, config: MlaConfig) -> Step:
        """Return the plan of a forward call for a layer; cached: its pages, None without a cache.

        Without padding nothing synchronises with the device. With an attention_mask, its sums are read once for all layers. Raises
        ValueError if the mask covers another number of tokens than the cache and the call have, or differs from the masks of the
        cached tokens.
        """
        step = self._step
        before = ((0,) * inputs.shape[0], 0) if cached is None else (tuple(cached.lengths), cached.pages)
        if layer_idx == self.first_layer or step is None or step.before != before or not step.inputs.same_as(inputs):
            step = self._step = self._plan(inputs, cached, config)
        return step

    def _plan(self, inputs: StepInputs, cached: LatentCacheLayer | None, config: MlaConfig) -> Step:
        """Plan a call. Few new tokens over cached keys are decoded in the absorbed form, other calls are prefilled."""
        batch, tokens = inputs.shape
        seen, pages, lengths = (0, 0, [0] * batch) if cached is None else (cached.seen, cached.pages, cached.lengths)
        new, rows = _real_tokens(inputs, seen, lengths)
        if cached is None:
            plan = plan_sequences(new, inputs.device)
        else:
            table = torch.arange(batch * pages, dtype=torch.int32, device=inputs.device).view(batch, pages)
            decoded = seen > 0 and set(new) == {tokens} and tokens < absorbed_tokens(config)
            plan = plan_batch(new, lengths, table, PAGE_SIZE, decodes=batch if decoded else 0, chunk_tokens=self.chunk_tokens)
        if inputs.position_ids is not None:
            positions = inputs.position_ids.expand(batch, tokens).flatten()
            plan = replace(plan, positions=positions if rows is None else positions[rows])
        return Step(inputs, (tuple(lengths), pages), new, rows, plan)


def absorbed_tokens(config: MlaConfig) -> int:
    """Return the new tokens of a request from which on the decompressed form takes fewer multiplications than the absorbed form.

    A key and a head cost key_columns + kv_lora_rank multiplications per query in the absorbed form. They cost query_columns + v_head_dim
    in the decompressed form, and once kv_lora_rank * (qk_nope_head_dim + v_head_dim) to decompress the key: 171 for DeepSeek-V3.
    """
    saved = config.key_columns + config.kv_lora_rank - config.query_columns - config.v_head_dim
    return -(-config.kv_lora_rank * (config.qk_nope_head_dim + config.v_head_dim) // saved)


def _real_tokens(inputs: StepInputs, seen: int, lengths: list[int]) -> tuple[list[int], torch.Tensor | None]:
    """Return the tokens of each request that are no padding, and the rows that hold them, None for all."""
    batch, tokens = inputs.shape
    mask = inputs.attention_mask
    if mask is None:
        if any(length != seen for length in lengths):
            raise ValueError(f"attention_mask is None, and some of the {seen} cached tokens are padding; supported: the mask of all tokens")
        return [tokens] * batch, None
    if inputs.local_mask and mask.shape[1] == tokens:
        new = mask.sum(1).tolist()
        return new, None if min(new, default=0) == tokens else mask.bool().flatten().nonzero().squeeze(1)
    if mask.shape[1] != seen + tokens:
        raise ValueError(
            f"attention_mask covers {mask.shape[1]} tokens, with {seen} cached and {tokens} new ones; supported: {seen + tokens}"
        )
    masked = mask.bool()
    cached, new = torch.stack((masked[:, :seen].sum(1), masked[:, seen:].sum(1))).tolist()
    if cached != lengths:
        raise ValueError(f"attention_mask keeps {cached} cached tokens, and {lengths} were no padding before; supported: the same")
    return new, None if min(new, default=0) == tokens else masked[:, seen:].flatten().nonzero().squeeze(1)
