"""SVG plots of benchmark rows: the roofline, and times against batch and length."""
