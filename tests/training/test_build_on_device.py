"""A large model is made and loaded on its GPUs: the host never holds it, nor more than one rank's part of a parameter.

The "meta" device stands for a GPU here: whatever is made on it takes no memory, so each number that the host allocates
is counted as it is made.
"""

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from conversion_cases import DENSE as CONVERTED
from conversion_cases import architecture_in, dense_config, save_huggingface, shape_of
from megatron_dta.core.config import ModelConfig
from megatron_dta.core.model import build as provider
from megatron_dta.core.model.build import build_model
from megatron_dta.core.model.parallel.mesh import initialize_parallel
from megatron_dta.training.huggingface.weights import HfWeights

DENSE = ModelConfig(
    num_layers=3, hidden_size=64, ffn_hidden_size=160, num_attention_heads=4, num_query_groups=2, vocab_size=211,
    swiglu=True, disable_bias_linear=True, qk_layernorm=True, untie_embeddings_and_output_weights=True,
    max_position_embeddings=16, bf16=True,
)  # fmt: skip


class HostMemory(TorchDispatchMode):
    """Numbers that ops make on the host: the largest tensor, and all together."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = self.total = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        views = {t.untyped_storage().data_ptr() for t in args if isinstance(t, torch.Tensor) and t.device.type == "cpu"}
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(tensor, torch.Tensor) and tensor.device.type == "cpu":
                if tensor.untyped_storage().data_ptr() in views:
                    continue
                self.largest, self.total = max(self.largest, tensor.numel()), self.total + tensor.numel()
        return result


@pytest.fixture
def meta_is_a_gpu(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    device = initialize_parallel(1)
    assert device.type in ("cpu", "cuda")
    monkeypatch.setattr(provider.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: torch.device("meta"))
    # The state of a GPU's random numbers, which weights on "meta" do not use up.
    monkeypatch.setattr("megatron.core.tensor_parallel.random.get_cuda_rng_tracker", lambda *_, **__: NoTracker())
    monkeypatch.setattr("megatron.core.tensor_parallel.layers.get_cuda_rng_tracker", lambda *_, **__: NoTracker())
    return torch.device("meta")


class NoTracker:
    def fork(self, *_: object) -> AbstractContextManager:
        return nullcontext()


def test_weights_are_made_on_the_device(meta_is_a_gpu: torch.device) -> None:
    with HostMemory() as host:
        model = build_model(DENSE, meta_is_a_gpu)
    parameters = list(model.parameters())
    assert {p.device.type for p in parameters} == {"meta"}
    assert {p.dtype for p in parameters} == {torch.bfloat16}
    norms = sum(p.numel() for p in parameters if p.dim() == 1)
    matrices = [p.numel() for p in parameters if p.dim() == 2]
    # Norms are PyTorch's and made on the host, one at a time; so are tables of rotary frequencies.
    assert host.largest <= max(DENSE.hidden_size, DENSE.max_position_embeddings * DENSE.kv_channels)
    assert host.total <= 8 * norms + 4 * DENSE.max_position_embeddings * DENSE.kv_channels
    assert host.total < 0.1 * sum(matrices)


def test_the_count_sees_a_model_made_on_the_host() -> None:
    device = initialize_parallel(1)
    with HostMemory() as host:
        model = build_model(DENSE, device)
    assert host.total >= sum(p.numel() for p in model.parameters())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_huggingface(tmp_path, CONVERTED[0], 3)
    return tmp_path


def test_loading_has_one_parameter_at_a_time_on_the_host(folder: Path, meta_is_a_gpu: torch.device) -> None:
    model = build_model(dense_config(folder), meta_is_a_gpu)
    weights = HfWeights([model], architecture_in(folder), shape_of(folder))
    with HostMemory() as host:
        weights.load(folder)
    sizes = [p.numel() for p in model.parameters()]
    assert max(sizes) <= host.largest <= 2 * max(sizes)
    assert sum(sizes) > 4 * host.largest
