"""Tests of the ahead-of-time build and of the wheel."""
