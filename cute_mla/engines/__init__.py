"""Adapters to serving engines, one folder per engine, and the code that adapters share.

An adapter imports its engine; no other module of cute_mla imports an adapter.
"""
