"""Tests of mqa_logits."""
