"""Parts of the experiments of Tree Training, one module each; ``tree_training.py`` puts them together."""
