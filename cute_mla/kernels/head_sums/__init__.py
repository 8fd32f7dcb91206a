"""Sums over the heads at the keys that tokens have chosen: probabilities of attention, and scores of an indexer."""
