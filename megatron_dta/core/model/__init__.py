"""The model layer: the only package that imports Megatron's model classes and the kernels."""
