"""Tests of the integrations with libraries that hold models."""
