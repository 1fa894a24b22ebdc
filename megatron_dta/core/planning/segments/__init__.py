"""Cuts a prefix forest into segments and orders their forward and backward passes."""
