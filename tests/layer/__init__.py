"""Tests of the MLA layer."""
