"""Sampling on servers while training goes on."""
