"""Products and activations of grouped experts."""
