"""Find what references a storage, and write it as an expression that a user can type."""
