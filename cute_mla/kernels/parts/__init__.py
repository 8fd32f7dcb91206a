"""Device code that more than one kernel uses."""
