"""Clock: timing simulation of machine code, cycle by cycle, on one CTA or cluster, and from there on the grid."""
