"""Tests of converted checkpoints in transformers."""
