"""Times the kernels of a model's layers one by one on a GPU: attention, fused layers, experts, recurrence."""
