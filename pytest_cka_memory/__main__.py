"""Run ``python -m pytest_cka_memory``."""

import gc
import sys

from pytest_cka_memory.cli.main import main

if __name__ == "__main__":
    gc.disable()  # a large report is a million objects without cycles: collections only cost time
    sys.exit(main())
