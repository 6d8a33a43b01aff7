"""The name of this machine's processor."""

import platform


def processor_name() -> str:
    """Return it as the system shows it, such as ``AMD EPYC 9B45``."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            names = [line.partition(":")[2].strip() for line in lines if "model name" in line]
    except OSError:
        names = []
    return names[0] if names else platform.processor() or platform.machine() or "cpu"
