"""Frequencies and rotations against values worked out by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from cute_mla.layer import Llama3Scaling, MlaConfig, YarnScaling
from cute_mla.layer.rope import Rotation, frequencies, interleaved, rotation
from tests.layer.mla_models import GLM_5_3_FLASH, MISTRAL_SMALL_4, V3

CONFIG = MlaConfig.from_hugging_face(V3)


def test_frequencies_without_scaling() -> None:
    radians = frequencies(replace(CONFIG, rope_scaling=None))
    assert radians.dtype == torch.float32
    assert radians[[0, 8, 16, 24]].tolist() == pytest.approx([1.0, 0.1, 0.01, 0.001], rel=1e-6)


def test_frequencies_with_yarn() -> None:
    """YaRN slows pairs down by how often they turn in 4096 positions.

    Pairs 0 to 10 turn at least 32 times and keep their frequency. Pairs from 23 on turn at most once and are 40 times slower. Between
    them the share is linear: pair 16 has 7 / 13 of its own frequency and 6 / 13 of a 40th, 0.55 of it in all.
    """
    radians = frequencies(CONFIG).tolist()
    plain = [10_000 ** (-pair / 32) for pair in range(32)]
    shares = [slowed / own for slowed, own in zip(radians, plain, strict=True)]
    assert shares[:11] == pytest.approx([1.0] * 11, rel=1e-6)
    assert shares[23:] == pytest.approx([1 / 40] * 9, rel=1e-6)
    assert radians[16] == pytest.approx(0.0055, rel=1e-6)
    assert shares[11] == pytest.approx(12 / 13 + 1 / 13 / 40, rel=1e-6)


def test_frequencies_of_llama_3() -> None:
    """Pairs that turn 4 times within 8192 positions keep their frequency, those that turn once or less are 8 times slower.

    With theta 500,000 pair 16 turns 1.84 times: (1.8438 - 1) / 3 = 0.28127 of its frequency stays, and 0.71873 / 8 of it, 0.37111 in all.
    """
    config = replace(CONFIG, rope_scaling=Llama3Scaling(8, 1, 4, 8192), rope_theta=500_000.0)
    shares = [own / 500_000 ** (-pair / 32) for pair, own in enumerate(frequencies(config).tolist())]
    assert shares[:15] == pytest.approx([1.0] * 15, rel=1e-6)
    assert shares[18:] == pytest.approx([1 / 8] * 14, rel=1e-6)
    assert shares[16] == pytest.approx(0.37111, rel=1e-4)
    turn = rotation(torch.tensor([0, 5]), frequencies(config), config)
    assert float(turn.cos[0].min()) == 1.0
    assert turn.query_scale is None


def test_a_ramp_of_no_width_is_a_step() -> None:
    """Over 8 original positions no pair turns twice, so every pair but the first is slowed down."""
    radians = frequencies(replace(CONFIG, rope_scaling=YarnScaling(40, 8, beta_fast=32, beta_slow=31)))
    assert radians[0] == 1.0
    assert radians[1:].tolist() == pytest.approx([10_000 ** (-pair / 32) / 40 for pair in range(1, 32)], rel=1e-6)


def test_neighbours_are_turned_together() -> None:
    """Pair 8 turns by 0.1 per position: (3, 4) at position 5, by 0.5."""
    turn = rotation(torch.tensor([0, 5]), frequencies(replace(CONFIG, rope_scaling=None)), CONFIG)
    columns = torch.zeros(2, 1, 64)
    columns[:, 0, 16:18] = torch.tensor([3.0, 4.0])
    turned = turn.apply(columns)
    expected = torch.zeros(2, 1, 64)
    expected[0, 0, 16:18] = torch.tensor([3.0, 4.0])
    expected[1, 0, 16] = 3 * math.cos(0.5) - 4 * math.sin(0.5)
    expected[1, 0, 17] = 3 * math.sin(0.5) + 4 * math.cos(0.5)
    torch.testing.assert_close(turned, expected)


def test_rotary_columns_are_scaled() -> None:
    scaled = replace(CONFIG, rope_scaling=YarnScaling(40, 4096, mscale=1.0, mscale_all_dim=0.0))
    turn = rotation(torch.tensor([0]), frequencies(scaled), scaled)
    torch.testing.assert_close(turn.apply(torch.ones(1, 64)), torch.full((1, 64), 1.36888795))


def test_queries_grow_with_their_position() -> None:
    """Mistral's: by 0.1 ln(1 + floor(position / 8192)), at the boundary and not before."""
    config = MlaConfig.from_hugging_face(MISTRAL_SMALL_4)
    scale = rotation(torch.tensor([0, 8191, 8192, 16383, 81920]), frequencies(config), config).query_scale
    assert scale is not None
    # ln 2 = 0.69314718, ln 11 = 2.39789527
    assert scale.tolist() == pytest.approx([1.0, 1.0, 1.069314718, 1.069314718, 1.239789527], rel=1e-6)
    assert rotation(torch.tensor([9000]), frequencies(CONFIG), CONFIG).query_scale is None


def test_keys_without_rotary_columns() -> None:
    config = MlaConfig.from_hugging_face(GLM_5_3_FLASH)
    turn = rotation(torch.tensor([0, 5]), frequencies(config), config)
    assert turn.cos.shape == (2, 0)
    assert turn.apply(torch.ones(2, 3, 0)).shape == (2, 3, 0)
    assert interleaved(torch.ones(3, 0, 7)).shape == (3, 0, 7)


def test_rounded_once() -> None:
    turn = Rotation(torch.full((1, 32), 0.6), torch.full((1, 32), 0.8))
    columns = torch.randn(1, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    assert torch.equal(turn.apply(columns), turn.apply(columns.float()).bfloat16())


def test_halves_interleaved() -> None:
    rows = torch.arange(64.0).unsqueeze(1).expand(64, 2)
    expected = [half + pair for pair in range(32) for half in (0.0, 32.0)]
    assert interleaved(rows)[:, 1].tolist() == expected
    assert interleaved(torch.stack((rows, rows + 64)))[1, :, 0].tolist() == [value + 64 for value in expected]
