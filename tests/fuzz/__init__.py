"""Calls of every function that launches kernels, drawn at random: each agrees with the reference, or raises the documented error.

calls: what a call is, and how it is written down. drawing: calls that are right. breaking: what is done to their arguments. contract: which
arguments are at fault, by the documentation alone. subjects: the functions that are called, and what they must return. judging: makes one
call. campaign: makes many.
"""
