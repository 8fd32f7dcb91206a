"""Pure functions on arrays: roundings, formats, operands, fragments, boxes, matrix products."""
