"""Parts of the TreePO experiment: sizes and variants, processes, training, sampling, curves, tables and plots."""
