"""Integrations with libraries that hold models, one folder per library.

An integration imports its library; no other module of cute_mla imports an integration.
"""
