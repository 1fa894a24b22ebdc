"""Errors, files and the command-line parser that every other package uses."""
