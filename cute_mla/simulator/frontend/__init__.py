"""PTX text to instructions, and the places of registers, parameters and shared variables."""
