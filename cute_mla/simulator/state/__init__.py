"""Passive state of a launch: registers, memory, barriers, CTAs and their asynchronous work."""
