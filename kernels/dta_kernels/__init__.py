"""Attention kernels of megatron_dta, each with a plain PyTorch reference beside it.

The folder is called ``kernels/`` and the import package ``dta_kernels``: a top-level package named ``kernels`` would
shadow Hugging Face's package of that name in every process that runs in this repository's directory.
"""
