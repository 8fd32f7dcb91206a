"""Tests of cute-mla. Folders bear the name of what they test; support holds what several of them share."""
