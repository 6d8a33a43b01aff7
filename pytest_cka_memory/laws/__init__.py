"""Memory laws: how a figure of memory grows with sizes, as exact polynomials."""
