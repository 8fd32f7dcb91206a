"""Fixtures for tests of this operation."""

from __future__ import annotations

from tests.support.archs import archs_of

arch = archs_of("indexer_topk")
