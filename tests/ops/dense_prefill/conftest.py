"""Fixtures for tests of dense prefill."""

from __future__ import annotations

from tests.support.archs import archs_of

arch = archs_of("dense_prefill")
