"""Lists of the (token, slot) pairs that name each key."""
