"""The model layer: the only package that imports Megatron's model classes and the kernels."""

from megatron_dta.core.model.parallel.megatron_patches import import_megatron_uncompiled

import_megatron_uncompiled()
