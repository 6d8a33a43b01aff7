"""What a session prints and writes, alone or as a rank of torchrun."""
