"""Selection of a model's layers, and the features of their outputs during a forward pass."""
