"""Tests of topk_indices."""
