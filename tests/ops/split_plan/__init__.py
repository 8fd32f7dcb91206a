"""Tests of the plans that get_mla_metadata makes."""
