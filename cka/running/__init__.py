"""Runs models over batches and estimates CKA from their features."""
