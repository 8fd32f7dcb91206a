"""Fixtures for tests of the layer, which runs without gradients wherever dense prefill does."""

from __future__ import annotations

from tests.support.archs import archs_of

arch = archs_of("dense_prefill")
