"""Tests of benchmarks, models and reports."""
