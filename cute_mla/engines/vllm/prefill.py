"""MLA prefill backend CUTE_MLA: attention over decompressed keys and values of new tokens and of chunks of the context."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.backends.mla.prefill.base import MLADimensions, MLAPrefillBackend

from ...api import flash_attn_varlen_func
from . import PREFILL
from .capability import DTYPES, has_kernels_for, supported_on_any, unsupported_reason

_OP = "dense_prefill"


class CuteMlaPrefill(MLAPrefillBackend):
    """Prefill backend of a layer or of a metadata builder; the builder sets the sequences of each batch."""

    supported_dtypes: ClassVar[list[torch.dtype]] = DTYPES

    @staticmethod
    def get_name() -> str:
        """Return the name that vLLM registers."""
        return PREFILL

    @classmethod
    def supports_compute_capability(cls, device_capability: DeviceCapability | None) -> bool:
        """Return True if devices of this compute capability run the kernels."""
        return has_kernels_for(_OP, device_capability)

    @classmethod
    def supports_mla_dimensions(cls, mla_dimensions: MLADimensions) -> bool:
        """Return True if a layer of these sizes is supported on any architecture."""
        d_qk = mla_dimensions.qk_nope_head_dim + mla_dimensions.qk_rope_head_dim
        return supported_on_any(_OP, head_dim=d_qk, head_dim_v=mla_dimensions.v_head_dim)

    @classmethod
    def validate_configuration(cls, device_capability: DeviceCapability | None, selector_config: Any) -> list[str]:
        """Return why layers are not supported on devices of a compute capability: vLLM's reasons, and sizes that others support."""
        reasons: list[str] = super().validate_configuration(device_capability, selector_config)
        if reasons or device_capability is None:
            return reasons
        sizes = selector_config.mla_dimensions
        columns = {"head_dim": sizes.qk_nope_head_dim + sizes.qk_rope_head_dim, "head_dim_v": sizes.v_head_dim}
        reason = unsupported_reason(_OP, device_capability, selector_config.dtype, None, **columns)
        return [] if reason is None else [reason]

    def supports_out(self) -> bool:
        """Return True: the caller may pass out."""
        return True

    def run_prefill_new_tokens(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        return_softmax_lse: bool,
        out: torch.Tensor | None = None,
        output_scale: torch.Tensor | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Compute causal attention of each sequence over its own new keys.

        q, k: [tokens, heads, d_qk]; v: [tokens, heads, 128]. Returns out [tokens, heads, 128] and, with return_softmax_lse, lse fp32
        [heads, tokens] in natural log.
        """
        if output_scale is not None:
            raise NotImplementedError("output_scale is given; supported: None, out has the type of q")
        starts, longest = self._prefill_metadata.query_start_loc, self._prefill_metadata.max_query_len
        out, lse = self._attention(q, k, v, out, cu_seqlens_qo=starts, cu_seqlens_kv=starts, max_seqlen_qo=longest, max_seqlen_kv=longest)
        return (out, lse) if return_softmax_lse else out

    def run_prefill_context_chunk(
        self, chunk: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute unmasked attention of query tokens over the keys of a context chunk.

        Returns out and lse as run_prefill_new_tokens does; lse of a token without keys is -inf, as vLLM's merge expects.
        """
        return self._attention(
            q,
            k,
            v,
            out,
            causal=False,
            cu_seqlens_qo=chunk.query_start_loc,
            cu_seqlens_kv=chunk.cu_seq_lens,
            max_seqlen_qo=chunk.max_query_len,
            max_seqlen_kv=chunk.max_seq_len,
        )

    def _attention(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor | None, causal: bool = True, **sequences: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        lse = q.new_empty((q.shape[1], q.shape[0]), dtype=torch.float32)
        out, _ = flash_attn_varlen_func(
            q, k, v, **sequences, softmax_scale=self.scale, causal=causal, out=out, lse=lse.transpose(0, 1), empty_lse=-math.inf
        )
        return out, lse
