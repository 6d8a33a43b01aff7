"""The history of a project's figures: one line a session, and the trends in it."""
