"""Training of an indexer: what it should predict, what it predicts, the loss between them, and gradients."""

from __future__ import annotations

from typing import Any

import torch

from ..ops.arguments import needs_grad
from ..ops.fixed_sums import neighbour_sums
from ..ops.key_lists import DEFAULT_WORKSPACE
from ..ops.tensor_spec import TensorSpec, check_device, check_dtype, spec_of
from ..tracing import indexer
from ..tracing.public import public


@public(indexer.HEAD_SUMS)
def attention_head_sums(
    q: torch.Tensor,
    kv: torch.Tensor,
    lse: torch.Tensor,
    indices: torch.Tensor,
    sm_scale: float,
    attn_sink: torch.Tensor | None = None,
    topk_length: torch.Tensor | None = None,
    *,
    kv_offsets: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Sum attention's probabilities over the heads at the keys that each query token has chosen.

    q, kv, sm_scale, attn_sink, kv_offsets
                     as in flash_mla_sparse_fwd, with or without a batch; up to 128 heads
    indices, topk_length
                     likewise, but need not be those of the attention: any keys of the request may be asked for
    lse              fp32 [.., s_q, h_q], natural logarithm, without the sink: of attention over whatever keys. With the lse of all keys
                     that a token attends to, windows included, the sums are those of its whole softmax
    out              fp32 [.., s_q, topk] for the result, contiguous

    Returns fp32 [.., s_q, topk]: sum_h exp(sm_scale <q_h, k> - ln(e^lse_h + e^sink_h)); 0 for slots that name no key. A head whose lse is
    infinite, or whose sink is inf, adds nothing. Scores are summed in fp32 from bf16 operands, probabilities are not rounded, and heads are
    added in a fixed order: bits depend on the token, its heads and the key alone. Ranks that have shares of the heads add up their sums
    before indexer_targets or indexer_loss. Nothing has a gradient here.

    q whose rows do not begin at multiples of 16 bytes is copied. With out given, nothing else is allocated. Runs on the current stream,
    does not synchronise, and can be captured in a CUDA graph. CPU tensors run on the simulated device inside cute_mla.simulate().

    Raises ValueError on bad arguments, ArtifactError if the built kernels cannot be used, DeviceError if driver or device refuse,
    SimulationError if the simulated device finds fault with a kernel.
    """


@public(indexer.SCORES, also=(needs_grad, "q, k, weights"))
def indexer_scores(
    q: torch.Tensor,
    k: torch.Tensor,
    weights: torch.Tensor,
    indices: torch.Tensor,
    topk_length: torch.Tensor | None = None,
    *,
    kv_offsets: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute an indexer's scores at the keys that each query token has chosen.

    q                bf16 [.., s_q, h, 128], up to 64 heads, with or without a batch
    k                bf16 [.., s_kv, 128], rows at multiples of 16 bytes; [s_kv, 128] without a batch and with kv_offsets
    weights          fp32 [.., s_q, h], with all factors that scores have
    indices, topk_length, kv_offsets
                     as in flash_mla_sparse_fwd: indices int32 [.., s_q, 1, topk]
    out              fp32 [.., s_q, topk] for the result, contiguous

    Returns fp32 [.., s_q, topk]: sum_h weight_h relu(<q_h, k>), the logits of fp8_mqa_logits from bf16 operands; -inf for slots that name
    no key. Products are summed in fp32, heads in a fixed order: bits depend on the token, its heads and the key alone. Where an engine
    chooses keys by fp8 logits, pass q and k quantised and dequantised; their gradients go straight through.

    Gradients reach q, k and weights through indexer_backward. Allocation, streams, graphs, simulation and errors are as in
    attention_head_sums.
    """


@public(indexer.BACKWARD)
def indexer_backward(
    q: torch.Tensor,
    k: torch.Tensor,
    weights: torch.Tensor,
    indices: torch.Tensor,
    dscores: torch.Tensor,
    topk_length: torch.Tensor | None = None,
    *,
    kv_offsets: torch.Tensor | None = None,
    key_plan: tuple[torch.Tensor, torch.Tensor] | None = None,
    dk_accumulate: bool = False,
    max_workspace: int = DEFAULT_WORKSPACE,
    dq: torch.Tensor | None = None,
    dk: torch.Tensor | None = None,
    dweights: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute the gradients of indexer_scores' q, k and weights from that of its result.

    q, k, weights, indices, topk_length, kv_offsets
                     as in indexer_scores
    dscores          fp32 [.., s_q, topk]: gradient of the scores. Of slots that name no key it may be anything
    key_plan         as in flash_mla_sparse_bwd: with the same indices, that of attention
    dk_accumulate    add the gradient of k to dk, which is fp32
    max_workspace    bytes that the call may allocate for what lies between its kernels, in chunks of at least one token: 0.5 MB a token of
                     2,048 indices. Chunks never change a bit
    dq               bf16, of q's shape, contiguous
    dk               bf16 or fp32, of k's shape, contiguous
    dweights         fp32, of weights' shape, contiguous

    Returns (dq, dk, dweights). The gradient of relu at 0 is 0. What a token adds to a head's score is rounded to bf16 once before the
    products for dq and dk, and once more as a row for dk; weights are summed in fp32. There are no atomic additions of floats: a row of dk
    is summed in fp32 over the tokens that have chosen it, one after the other. So bits depend neither on other tokens and requests nor on
    chunks or SMs. A row of k that no index names has dk 0.

    Allocation is as in flash_mla_sparse_bwd; streams, graphs, simulation and errors are as in attention_head_sums.
    """


def indexer_targets(head_sums: torch.Tensor) -> torch.Tensor:
    """Normalise sums over heads to a sum of 1 over the chosen keys: what an indexer is trained to predict.

    head_sums: fp32 [.., topk], as attention_head_sums returns them, of all heads. Returns fp32 [.., topk]; zeros where all sums are 0. The
    sum over the keys has a fixed order. Nothing has a gradient here. Any strides, any device. Raises ValueError on other tensors.
    """
    _rows_spec("head_sums", head_sums)
    head_sums = head_sums.detach()
    total = neighbour_sums(head_sums.movedim(-1, 0)).unsqueeze(-1)
    return torch.where(total > 0, head_sums / total, 0.0)


def _rows_spec(name: str, tensor: Any) -> TensorSpec:
    """Return the spec of an argument that is fp32 [.., topk]. ValueError if it is not."""
    spec = spec_of(name, tensor)
    check_dtype(name, spec, torch.float32)
    if not spec.shape:
        raise ValueError(f"{name} has shape []; supported: [.., topk]")
    return spec


class _Divergence(torch.autograd.Function):
    """KL(targets || softmax(scores)) of each token, whose gradient is softmax(scores) - targets."""

    @staticmethod
    def forward(ctx: Any, scores: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        top = scores.amax(dim=-1, keepdim=True)
        top = top.masked_fill(top.isinf(), 0.0)
        powers = (scores - top).exp()
        total = neighbour_sums(powers.movedim(-1, 0)).unsqueeze(-1)
        wanted = targets > 0
        surprise = targets.log() - (scores - top) + total.log()
        ctx.save_for_backward(torch.where(wanted.any(dim=-1, keepdim=True), powers / total - targets, 0.0))
        return neighbour_sums(torch.where(wanted, targets * surprise, 0.0).movedim(-1, 0))

    @staticmethod
    def backward(ctx: Any, dloss: torch.Tensor) -> tuple[torch.Tensor, None]:
        (difference,) = ctx.saved_tensors
        return difference * dloss.unsqueeze(-1), None


def indexer_loss(scores: torch.Tensor, head_sums: torch.Tensor) -> torch.Tensor:
    """Compute the divergence of an indexer's prediction from attention, KL(targets || softmax(scores)), of each token.

    scores: fp32 [.., topk], of indexer_scores, -inf for slots that name no key. head_sums: fp32 [.., topk], of attention_head_sums, 0
    there. Returns fp32 [..], 0 for a token without keys or without probabilities. Its gradient reaches scores alone: softmax(scores) -
    indexer_targets(head_sums). Sums have fixed orders, so that the bits of a token depend on it alone; a sum over tokens is the caller's.
    Any strides, any device. Raises ValueError on other tensors, and on topk 0.
    """
    rows, sums = _rows_spec("scores", scores), _rows_spec("head_sums", head_sums)
    if rows.shape != sums.shape or not rows.shape[-1]:
        raise ValueError(
            f"scores has shape {list(rows.shape)} and head_sums {list(sums.shape)}; supported: both [.., topk], topk 1 or more"
        )
    check_device("head_sums", sums, rows.device, "scores")
    loss: torch.Tensor = _Divergence.apply(scores, indexer_targets(head_sums))
    return loss
