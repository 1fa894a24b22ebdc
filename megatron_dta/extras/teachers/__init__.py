"""Teachers in processes of their own, for distillation."""
