"""Gives new weights to inference servers: through a folder, or through a process group shared with them."""
