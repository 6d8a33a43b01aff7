"""Running models over batches, and estimating CKA from what their layers return."""
