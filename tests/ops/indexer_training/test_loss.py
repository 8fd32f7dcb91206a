"""The loss of an indexer, its targets, and gradients of the whole by torch's autograd against fp64."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest
import torch

import cute_mla
from cute_mla.indexer import attention_head_sums, indexer_loss, indexer_scores, indexer_targets
from cute_mla.ops.fixed_sums import neighbour_sums
from cute_mla.spec.arch import Arch
from cute_mla.testing.compare import same_bits
from tests.ops.indexer_training.problems import SCALE, Simulated, chosen, expect_gradients, keys_of
from tests.support.tree import ROOT


def expected_loss(scores: torch.Tensor, sums: torch.Tensor) -> torch.Tensor:
    """Return the divergence of each token in the dtype of the scores, one token after the other."""
    losses = []
    for row, own in zip(scores.flatten(0, -2), sums.flatten(0, -2).to(scores.dtype), strict=True):
        targets = own[own > 0] / own.sum()
        prediction = row[row > -math.inf].logsumexp(0) if len(targets) else 0.0
        losses.append((targets * (targets.log() - row[own > 0] + prediction)).sum())
    return torch.stack(losses).view(scores.shape[:-1])


def drawn() -> tuple[torch.Tensor, torch.Tensor]:
    """Draw scores and sums of rows with all keys, some, one, none, and with keys that have no probability."""
    draw = torch.Generator().manual_seed(4)
    scores, sums = 3 * torch.randn(2, 3, 70, generator=draw), torch.rand(2, 3, 70, generator=draw)
    absent = torch.rand(2, 3, 70, generator=draw) < torch.tensor([[0.0, 0.5, 0.2], [1.1, 0.3, 0.0]]).unsqueeze(-1)
    absent[0, 2, 0], absent[0, 2, 1:] = False, True
    sums[1, 1], sums[1, 2, ::3] = 0.0, 0.0
    return scores.masked_fill(absent, -math.inf), sums.masked_fill(absent, 0.0)


def test_loss_and_its_gradient() -> None:
    scores, sums = drawn()
    mine, exact = scores.clone().requires_grad_(), scores.double().requires_grad_()
    loss, expected = indexer_loss(mine, sums), expected_loss(exact, sums)
    torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=1e-6)
    assert not loss[1, :2].any()
    upstream = torch.linspace(0.5, 2, 6).view(2, 3)
    (gradient,), (wanted,) = torch.autograd.grad(loss, mine, upstream), torch.autograd.grad(expected, exact, upstream.double())
    torch.testing.assert_close(gradient.double(), wanted, rtol=1e-5, atol=1e-7)
    assert not gradient[scores == -math.inf].any()


def test_targets() -> None:
    _, sums = drawn()
    targets = indexer_targets(sums)
    torch.testing.assert_close(
        targets.double(), torch.nan_to_num(sums.double() / sums.double().sum(dim=-1, keepdim=True)), rtol=1e-6, atol=0
    )
    assert not targets[1, 0].any()


def test_bits_of_a_token_depend_on_it_alone() -> None:
    scores, sums = drawn()
    losses, targets = indexer_loss(scores, sums), indexer_targets(sums)
    for row in range(3):
        assert same_bits(indexer_loss(scores[0, row], sums[0, row]), losses[0, row])
        assert same_bits(indexer_targets(sums[0, row]), targets[0, row])


def test_shapes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match=r"scores has shape \[3, 4\] and head_sums \[3, 5\]; supported: both \[.., topk\], topk 1 or more"):
        indexer_loss(torch.zeros(3, 4), torch.zeros(3, 5))
    with pytest.raises(ValueError, match="topk 1 or more"):
        indexer_loss(torch.zeros(3, 0), torch.zeros(3, 0))


@pytest.mark.parametrize("terms", [0, 1, 2, 3, 7, 8, 100])
def test_neighbour_sums(terms: int) -> None:
    values = torch.randn(terms, 3, generator=torch.Generator().manual_seed(terms))
    rows = list(values) or [torch.zeros(3)]
    while len(rows) > 1:
        pairs = [rows[i] + rows[i + 1] for i in range(0, len(rows) - 1, 2)]
        rows = pairs + rows[2 * len(pairs) :]
    assert same_bits(neighbour_sums(values), rows[0])


def test_gradients_of_the_loss_reach_the_indexer(arch: Arch) -> None:
    """From attention's probabilities to dq, dk and dweights, against autograd in fp64 over the sums of the kernel."""
    attention, call = chosen(keys_of(40, 60), 3, 512), chosen(keys_of(40, 60), 5, 128)
    leaves = [tensor.requires_grad_() for tensor in (call.q, call.k, call.terms)]
    with Simulated(arch.name).active():
        sums = attention_head_sums(attention.q, attention.k.unsqueeze(-2), attention.terms, call.tables()["indices"], SCALE)
        loss = indexer_loss(indexer_scores(*leaves, **call.tables()), sums)
        gradients = torch.autograd.grad(loss.sum(), leaves)
    exact = call.doubles()
    expected = expected_loss(call.expected_scores(exact), sums)
    torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=1e-4)
    expect_gradients(gradients, torch.autograd.grad(expected.sum(), exact))


def test_compiled_gradients_are_the_same() -> None:
    """The loss is one graph with its backward pass."""
    torch._dynamo.reset()
    call = chosen(keys_of(9, 20), 3, 128)
    leaves = [tensor.requires_grad_() for tensor in (call.q, call.k, call.terms)]
    sums = call.named().float()

    def loss(*operands: torch.Tensor) -> torch.Tensor:
        return indexer_loss(indexer_scores(*operands, **call.tables()), sums).sum()

    with cute_mla.simulate("sm90", sm_count=4):
        usual = torch.autograd.grad(loss(*leaves), leaves)
        compiled = torch.autograd.grad(torch.compile(loss, backend="aot_eager", fullgraph=True)(*leaves), leaves)
    assert all(map(same_bits, compiled, usual))


def test_what_is_refused_with_gradients() -> None:
    call = chosen(keys_of(5, 9), 2, 128)
    call.q.requires_grad_()
    with cute_mla.simulate("sm90", sm_count=4):
        with pytest.raises(ValueError, match="q requires grad; supported: gradients of calls that allocate their results"):
            indexer_scores(call.q, call.k, call.terms, **call.tables(), out=torch.zeros(2, 2, 5))
        with pytest.raises(ValueError, match="q requires grad; supported: tensors that do not, because the backward pass"):
            call.gradients(Simulated("sm90"), torch.zeros(2, 2, 5))


@pytest.mark.skipif(torch.cuda.is_available(), reason="says how it fares on the simulated device")
@pytest.mark.slow
def test_the_program_that_trains_an_indexer_runs(arch: Arch, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run it here and not with the other examples: it needs kernels that `make quick` does not build."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    run = [sys.executable, str(ROOT / "examples" / "train_indexer.py"), arch.name]
    result = subprocess.run(run, capture_output=True, text=True, timeout=600, check=False)
    assert result.returncode == 0, result.stderr
    assert f"simulated {arch.name} with" in result.stdout
