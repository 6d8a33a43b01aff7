"""A simulated CUDA device: fake tensors over a simulation of the caching allocator."""
