"""Where the Triton kernels run in tests: on the GPU if there is one, else in Triton's interpreter."""

import os

import pytest
import torch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

kernels_run = pytest.mark.skipif(
    DEVICE.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1", reason="needs a GPU or Triton's interpreter"
)
interpreter = pytest.mark.skipif(
    DEVICE.type != "cpu" or os.environ.get("TRITON_INTERPRET") != "1",
    reason="runs in Triton's interpreter, without a GPU; for a GPU there is tests/gpu/test_gpu_tree_attention.py",
)
