"""Adapters to serving engines, one folder each, and what they share. An adapter imports its engine; nothing else of cute_mla imports
an adapter."""
