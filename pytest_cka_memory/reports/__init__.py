"""Results to text: every module here takes plain results and returns lines or strings."""
