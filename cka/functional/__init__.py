"""From features of samples to CKA: kernels, HSIC and sums over batches."""
