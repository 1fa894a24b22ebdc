"""Derives quantities from the settings: layers of stages and experts, sizes of adapters, device queues."""
