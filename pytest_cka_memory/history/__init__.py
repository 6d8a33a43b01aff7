"""The history of a project's figures: one line per session, and its trends."""
