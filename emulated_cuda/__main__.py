"""``python -m emulated_cuda``: run a program, or a function, on CUDA cards that do not exist."""

import sys

from emulated_cuda import estimating, running

if __name__ == "__main__":
    if sys.argv[1:2] == ["estimate"]:
        sys.exit(estimating.main(sys.argv[2:]))
    sys.exit(running.main(sys.argv[1:]))
