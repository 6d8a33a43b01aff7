"""Plain values and rules: no torch, no pytest."""
