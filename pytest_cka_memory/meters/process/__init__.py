"""Memory of this process and its children, as the operating system counts it."""
