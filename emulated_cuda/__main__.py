"""``python -m emulated_cuda``: run a program on CUDA cards that do not exist."""

import sys

from emulated_cuda.running import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
