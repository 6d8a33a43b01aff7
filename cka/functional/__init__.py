"""Functions from feature matrices to CKA: kernels, HSIC, sums over batches."""
