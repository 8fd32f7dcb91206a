"""Fixtures for tests of sparse prefill."""

from __future__ import annotations

from tests.support.archs import archs_of

arch = archs_of("sparse_prefill")
