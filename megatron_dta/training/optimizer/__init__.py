"""The optimizer and its states."""
