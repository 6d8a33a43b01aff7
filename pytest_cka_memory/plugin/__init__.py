"""pytest's hooks, and what only they need."""
