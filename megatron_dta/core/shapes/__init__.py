"""Shapes and sizes of models."""
