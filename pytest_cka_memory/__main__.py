"""``python -m pytest_cka_memory``."""

import gc
import sys

from pytest_cka_memory.cli import main

if __name__ == "__main__":
    gc.disable()  # a large report is a million objects and no cycle, walked through again and again
    sys.exit(main())
