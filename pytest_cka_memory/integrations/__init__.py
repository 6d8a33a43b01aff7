"""Other programs that run or show a session: pytest-xdist, torchrun, GitHub Actions."""
