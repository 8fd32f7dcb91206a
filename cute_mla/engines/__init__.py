"""Adapters to serving engines, one folder or module each. An adapter imports its engine; nothing else of cute_mla imports an adapter."""
