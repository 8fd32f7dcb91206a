"""Gradients of the layer: against autograd of the reference that is written out, by torch and by the kernels, and which are refused."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint as recompute

import cute_mla
from cute_mla.layer import MlaAttention, MlaBatch, MlaConfig, MlaWeights, Shard, plan_batch, plan_sequences
from cute_mla.layer.path import warn_once
from cute_mla.spec.arch import Arch
from cute_mla.spec.kernel_ops import ARCHS_OF
from tests.layer.mla_models import MODELS, PREFIX, V2_LITE, V3, checkpoint, naive, reduced
from tests.support.compiling import compiled, fresh

assert fresh

EVERY_MODEL = pytest.mark.parametrize("model", MODELS)
EVERY_ARCH = pytest.mark.parametrize("trained", ARCHS_OF["dense_prefill_backward"], ids=lambda arch: arch.name)
LENGTHS = (0, 1, 17, 0, 5)
NAMES = {
    "q_a": "q_a_proj",
    "q_a_norm": "q_a_layernorm",
    "kv_a": "kv_a_proj_with_mqa",
    "kv_a_norm": "kv_a_layernorm",
    "kv_b": "kv_b_proj",
    "o": "o_proj",
    "gate": "g_proj",
    "sinks": "sinks",
}
# The largest error that roundings of a dtype may make, against the largest element of a gradient. The reference path in bf16 makes 1.515e-2
# of it with the softmax scale of Mistral Small 4, half again that of V3.
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.55e-2}

Gradients = dict[str, Tensor]


@dataclass(frozen=True)
class Training:
    """A layer's weights, packed sequences, and the gradient of the output."""

    config: dict[str, Any]
    weights: dict[str, Tensor]
    lengths: Sequence[int]
    hidden: Tensor
    dout: Tensor

    @staticmethod
    def drawn(model: dict[str, Any], lengths: Sequence[int], dtype: torch.dtype, heads: int = 3) -> Training:
        """Draw sequences of these lengths for a reduced configuration."""
        config = reduced(model, heads=heads)
        hidden, dout = torch.randn(2, sum(lengths), config["hidden_size"], generator=torch.Generator().manual_seed(7)).to(dtype)
        return Training(config, checkpoint(config, dtype), lengths, hidden, dout)

    def layer(self) -> MlaAttention:
        """Return the layer under test, with gradients."""
        config = MlaConfig.from_hugging_face(self.config)
        return MlaAttention(config, MlaWeights.from_tensors(self.weights, config, prefix=PREFIX)).requires_grad_()

    def batch(self) -> MlaBatch:
        """Return the sequences as a batch."""
        return plan_sequences(self.lengths, "cpu")

    def gradients(self, layer: MlaAttention, call: Callable[..., Tensor] | None = None) -> tuple[Tensor, Gradients]:
        """Return the layer's output, and the gradients of hidden and of every weight. call: what computes the layer; default: itself."""
        hidden = self.hidden.clone().requires_grad_()
        out = (layer if call is None else call)(hidden, None, self.batch())
        named = {"hidden": hidden, **dict(layer.named_parameters())}
        found = torch.autograd.grad(out, list(named.values()), self.dout)
        return out.detach(), dict(zip(named, found, strict=True))

    def expected(self) -> Gradients:
        """Return the gradients in fp64 of the reference in the tests, without the package."""
        hidden = self.hidden.double().requires_grad_()
        leaves = {name: weight.double().requires_grad_() for name, weight in self.weights.items()}
        out = torch.cat([naive(states, leaves, self.config) for states in hidden.split(list(self.lengths))])
        found = torch.autograd.grad(out, [hidden, *leaves.values()], self.dout.float())
        short = {long: name for name, long in NAMES.items()} | {"q_b_proj": "q_b", "q_proj": "q_b"}
        names = ["hidden", *(short[name.removeprefix(PREFIX).removesuffix(".weight")] for name in leaves)]
        return dict(zip(names, found, strict=True))


def errors(found: Gradients, expected: Gradients) -> dict[str, float]:
    """Return the largest error of each gradient, against its largest element. Every gradient is there, and is not 0."""
    assert set(found) == set(expected)
    assert all(gradient.any() and gradient.isfinite().all() for gradient in found.values())
    return {name: ((found[name].float() - exact).abs().max() / exact.abs().max()).item() for name, exact in expected.items()}


def expect(found: Gradients, expected: Gradients, dtype: torch.dtype) -> None:
    """Assert that gradients are right, as well as their dtype allows."""
    assert {gradient.dtype for name, gradient in found.items() if name != "sinks"} == {dtype}
    assert max(errors(found, expected).values()) <= TOLERANCE[dtype]


@EVERY_MODEL
@pytest.mark.parametrize("heads", [1, 3])
def test_gradients_of_the_reference_path(model: str, heads: int) -> None:
    training = Training.drawn(MODELS[model], LENGTHS, torch.float32, heads)
    expect(training.gradients(training.layer())[1], training.expected(), torch.float32)


def test_without_yarn_and_with_an_epsilon_that_counts() -> None:
    plain = {**V3, "rope_scaling": None, "rope_theta": 500.0, "rms_norm_eps": 0.3}
    training = Training.drawn(plain, (9, 4), torch.float32)
    expect(training.gradients(training.layer())[1], training.expected(), torch.float32)


@pytest.mark.in_turn
@EVERY_ARCH
@pytest.mark.parametrize(
    ("model", "lengths", "heads", "dtype"),
    [
        ("v3", LENGTHS, 3, torch.bfloat16),
        ("v2_lite", (66, 3), 1, torch.bfloat16),
        ("mistral_far", (40, 3), 1, torch.bfloat16),
        ("glm_5", (66, 3), 1, torch.bfloat16),
        ("glm_5_3_flash", (5, 3), 2, torch.bfloat16),
        ("scaled_gated", (0, 40, 3), 2, torch.bfloat16),
    ],
)
def test_gradients_by_the_kernels(trained: Arch, model: str, lengths: Sequence[int], heads: int, dtype: torch.dtype) -> None:
    """No gradient is worse than twice the reference path's in the same dtype. The output has the bits of a call without gradients."""
    training = Training.drawn(MODELS[model], lengths, dtype, heads)
    layer, expected = training.layer(), training.expected()
    with cute_mla.simulate(trained, 2) as device:
        assert layer.path == "kernels"
        out, found = training.gradients(layer)
        assert device.launches == 3  # prefill, dq, dk and dv: no key is written
        with torch.no_grad():
            assert torch.equal(layer(training.hidden, None, training.batch()), out)
    assert device.findings == []
    expect(found, expected, dtype)
    by_kernels, by_torch = errors(found, expected), errors(training.gradients(layer)[1], expected)
    for name, error in by_kernels.items():
        assert error <= 2 * by_torch[name], name


def test_gradients_where_there_is_no_backward_pass(caplog: pytest.LogCaptureFixture) -> None:
    """The reference computes them, and says so once. Without gradients the same layer runs by the kernels."""
    warn_once.cache_clear()
    training = Training.drawn(MODELS["v3"], LENGTHS, torch.bfloat16)
    layer = training.layer()
    with cute_mla.simulate("sm120", 2) as device, caplog.at_level(logging.WARNING, logger="cute_mla.layer"):
        _, found = training.gradients(layer)
        assert device.launches == 0
        assert layer.path == "kernels"
        with torch.no_grad():
            layer(training.hidden, None, training.batch())
        assert device.launches == 1
    expect(found, training.expected(), torch.bfloat16)
    (message,) = [record.getMessage() for record in caplog.records]
    assert message.endswith("dense_prefill_backward: arch is sm120; supported for dense_prefill_backward: sm90, sm100")


@EVERY_ARCH
def test_a_batch_without_tokens_has_gradients_of_0(trained: Arch) -> None:
    training = Training.drawn(V3, (0, 0), torch.bfloat16)
    layer = training.layer()
    with cute_mla.simulate(trained, 2):
        out = layer(training.hidden, None, training.batch())
        out.sum().backward()
    assert out.shape == (0, 96)
    for weight in layer.parameters():
        assert weight.grad is not None
        assert not weight.grad.any()


@pytest.mark.parametrize("name", ["q_b", "kv_a", "kv_b", "o"])
def test_a_single_weight_may_require_a_gradient(name: str) -> None:
    """Its gradient has the same bits, as in fine-tuning of some weights."""
    training = Training.drawn(V3, (5, 3), torch.float32)
    _, expected = training.gradients(training.layer())
    layer = training.layer().requires_grad_(False)
    weight = getattr(layer, name).requires_grad_()
    layer(training.hidden, None, training.batch()).backward(training.dout)
    assert torch.equal(weight.grad, expected[name])
    assert all(other.grad is None for other in layer.parameters() if other is not weight)


def test_hidden_states_may_be_all_that_requires_a_gradient() -> None:
    training = Training.drawn(V3, (5, 3), torch.float32)
    _, expected = training.gradients(training.layer())
    hidden = training.hidden.clone().requires_grad_()
    training.layer().requires_grad_(False)(hidden, None, training.batch()).backward(training.dout)
    assert hidden.grad is not None
    assert torch.equal(hidden.grad, expected["hidden"])


@EVERY_MODEL
def test_gradients_of_two_ranks_make_the_whole(model: str) -> None:
    """Gradients of weights by head are the rank's own; the others add up."""
    training = Training.drawn(MODELS[model], (9, 4), torch.float32, heads=4)
    config = MlaConfig.from_hugging_face(training.config)
    weights = [MlaWeights.from_tensors(training.weights, config, shard=Shard(rank, 2), prefix=PREFIX) for rank in range(2)]
    first, second = (training.gradients(MlaAttention(config, part).requires_grad_())[1] for part in weights)
    joined = {"q_b": 0, "kv_b": 0, "o": 1, "gate": 0, "sinks": 0}
    whole = {
        name: torch.cat((first[name], second[name]), dim=joined[name]) if name in joined else first[name] + second[name] for name in first
    }
    expect(whole, training.expected(), torch.float32)


def test_a_cache_gets_the_keys_without_their_history() -> None:
    """A batch of plan_batch without cached keys has the same gradients, and writes what it writes without gradients."""
    training = Training.drawn(V3, (5, 3), torch.float32)
    layer = training.layer()
    _, expected = training.gradients(layer)
    batch = plan_batch([5, 3], [0, 0], torch.tensor([[1], [0]], dtype=torch.int32), 16)
    caches = [torch.full((2, 16, 1, 576), math.nan) for _ in range(2)]
    _, found = training.gradients(layer, lambda hidden, cache, plan: layer(hidden, caches[0], batch))
    with torch.no_grad():
        layer(training.hidden, caches[1], batch)
    assert all(torch.equal(found[name], gradient) for name, gradient in expected.items())
    assert not caches[0].requires_grad
    assert torch.equal(*(cache.nan_to_num(7.0) for cache in caches))
    assert caches[0].isnan().sum() == (32 - 8) * 576


def test_recomputed_activations_give_the_same_gradients() -> None:
    training = Training.drawn(V2_LITE, (5, 3), torch.float32)
    layer = training.layer()
    _, expected = training.gradients(layer)
    _, found = training.gradients(layer, lambda *args: recompute(layer, *args, use_reentrant=False))
    assert all(torch.equal(found[name], gradient) for name, gradient in expected.items())


@EVERY_ARCH
def test_a_compiled_layer_has_the_same_gradients(trained: Arch) -> None:
    training = Training.drawn(V3, (4, 2), torch.bfloat16)
    layer = training.layer()
    call, counter = compiled(layer)
    with cute_mla.simulate(trained, 2) as device:
        out, expected = training.gradients(layer)
        launches = device.launches
        traced_out, found = training.gradients(layer, call)
        assert device.launches == 2 * launches
    assert torch.equal(traced_out, out)
    assert counter.frame_count == 1
    assert all(torch.equal(found[name], gradient) for name, gradient in expected.items())


def steps() -> dict[str, tuple[MlaBatch, str]]:
    """Return batches that read the cache, and what an error says of them."""
    table = torch.tensor([[1], [0]], dtype=torch.int32)
    return {
        "decode": (plan_batch([1, 1], [3, 0], table, 16, decodes=2), "2 decode requests"),
        "cached": (plan_batch([1, 1], [3, 4], table, 16), "7 cached keys of prefill requests"),
        "both": (plan_batch([1, 1], [3, 4], table, 16, decodes=1), "1 decode requests and 4 cached keys of prefill requests"),
    }


@pytest.mark.parametrize("kind", ["decode", "cached", "both"])
def test_gradients_through_the_cache_are_refused(kind: str) -> None:
    """By name, before anything is written; without gradients all is as ever."""
    batch, named = steps()[kind]
    training = Training.drawn(V3, (1, 1), torch.float32)
    cache = torch.ones(2, 16, 1, 576)
    layer = training.layer()
    supported = "supported: prefill requests without cached keys, as plan_sequences makes them"
    for weights, states in ((True, False), (False, True)):
        layer.requires_grad_(weights)
        hidden = training.hidden.clone().requires_grad_(states)
        with pytest.raises(
            ValueError, match=f"^hidden or a weight requires grad, and the batch has {named}; {supported}, or any batch inside"
        ):
            layer(hidden, cache, batch)
        assert torch.equal(cache, torch.ones_like(cache))
        with torch.no_grad():
            assert not layer(hidden, cache.clone(), batch).requires_grad
    with pytest.raises(ValueError, match=f"^k_cache is None, and the batch has {named}; {supported}$"):
        layer(training.hidden, None, batch)


def test_a_scale_without_a_cache_is_refused() -> None:
    training = Training.drawn(V3, (2,), torch.float32)
    with pytest.raises(ValueError, match="descale_k is given, and k_cache is None; supported: descale_k of a cache"):
        training.layer()(training.hidden, None, training.batch(), descale_k=torch.ones(1))


class Copies(TorchDispatchMode):
    """Counts ops that join tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.joined = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.joined += func.overloadpacket is torch.ops.aten.cat
        return func(*args, **(kwargs or {}))


def test_without_gradients_nothing_is_joined() -> None:
    """Queries are turned in place, and keys written where prefill reads them."""
    training = Training.drawn(V3, (4, 2), torch.float32)
    layer, batch = training.layer(), training.batch()
    with Copies() as copies:
        layer(training.hidden, None, batch)
    assert copies.joined == 2
    for quiet in (replace(training).layer().requires_grad_(False), layer):
        with Copies() as copies, torch.set_grad_enabled(quiet is not layer):
            quiet(training.hidden, None, batch)
        assert copies.joined == 0
