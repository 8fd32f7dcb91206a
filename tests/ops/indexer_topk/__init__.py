"""Tests of indexer_topk."""
