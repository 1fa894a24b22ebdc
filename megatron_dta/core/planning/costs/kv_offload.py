"""Counts what ``--kv-offload-fraction`` moves between device and host, and judges whether computation hides it."""

from __future__ import annotations

# Layers on the host take turns in this number of buffers on the device.
NUM_BUFFERS = 2


def layers_on_host(num_layers: int, fraction: float) -> list[int]:
    """The layers, counted from 0, whose K/V slots are on the host: the given share, evenly spread over the depth."""
    count = round(fraction * num_layers)
    return [(2 * i + 1) * num_layers // (2 * count) for i in range(count)]


def layers_on_device(num_layers: float, fraction: float) -> float:
    """Number of layers whose K/V slots take memory on the device, buffers included."""
    count = round(fraction * num_layers)
    return num_layers - count + min(NUM_BUFFERS, count)
