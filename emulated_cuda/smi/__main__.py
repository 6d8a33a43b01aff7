"""``python -m emulated_cuda.smi``: what ``nvidia-smi`` of an emulated device runs."""

import os
import sys

from emulated_cuda.smi.command_line import main

if __name__ == "__main__":
    try:
        status = main(sys.argv[1:])
        sys.stdout.flush()
    except KeyboardInterrupt:  # how a loop ends
        status = 130
    except BrokenPipeError:  # "nvidia-smi | head"; Python would report it once more at the end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 1
    sys.exit(status)
