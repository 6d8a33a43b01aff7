"""``nvidia-smi`` of emulated devices: what NVML answers, as text."""
