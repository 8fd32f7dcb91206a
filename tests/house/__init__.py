"""Tests of the repository: house rules, README, examples, packaging."""
