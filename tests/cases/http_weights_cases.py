"""Cases and helpers that tests of http weights share."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from http_engine_cases import VOCABULARY


def write_checkpoint(folder: Path, seed: int) -> np.ndarray:
    """A folder that the servers can load; returns the table they make of it."""
    folder.mkdir()
    embedding = torch.randn(VOCABULARY, 4, generator=torch.Generator().manual_seed(seed)) / 4
    save_file({"model.embed_tokens.weight": embedding}, folder / "model.safetensors")
    (folder / "config.json").write_text("{}")
    return embedding.double().numpy() @ embedding.double().numpy().T * 20
