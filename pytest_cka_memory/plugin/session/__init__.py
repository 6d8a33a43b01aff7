"""The session: options, settings, the start of the hooks that measure, the meter."""
