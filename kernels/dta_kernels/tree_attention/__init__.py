"""Tree attention: one forward and backward kernel pair per GPU generation beside a plain PyTorch reference."""
