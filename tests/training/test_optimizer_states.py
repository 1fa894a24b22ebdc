"""Dtypes and places of optimizer states: what does not fit is refused; offloaded states train and resume as others do.

Megatron's offloading optimizer needs a GPU. Here bfloat16 tensors pass for a GPU's and float32 ones for the host's,
which is how that optimizer uses the two when everything is offloaded; its own code runs unchanged.
"""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from conftest import assert_equal_tensors, seed_all
from megatron_dta.core.common.errors import InputError
from megatron_dta.core.model.parallel import megatron_patches
from megatron_dta.training.checkpoint.files import find_checkpoint
from megatron_dta.training.checkpoint.save_load import load_checkpoint, save_checkpoint
from megatron_dta.training.config import OptimizationConfig
from megatron_dta.training.config.checks.optimizer_states import check_state_support
from megatron_dta.training.optimizer.build import _put_beside_parameters
from megatron_dta.training.weights.offload import HostStorages
from optimizer_states_cases import MODEL, RATES, Run

OFFLOAD = replace(RATES, use_precision_aware_optimizer=True, optimizer_cpu_offload=True)


@pytest.fixture
def bfloat16_is_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda self: self.dtype == torch.bfloat16), raising=False)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self, *_: self)
    # Nothing ever waits for a stream that runs nothing.
    monkeypatch.setattr(megatron_patches._NoStream, "wait", lambda self, stream: None, raising=False)


@pytest.mark.parametrize("then", [OFFLOAD, RATES], ids=["offloaded", "on the GPU"])
def test_a_run_with_offloaded_states_resumes(bfloat16_is_a_gpu: None, tmp_path: Path, then: OptimizationConfig) -> None:
    seed = int(seed_all(4).integers(1 << 30))
    straight = Run(seed, OFFLOAD)
    for number in range(3):
        straight.step(number)
    save_checkpoint(tmp_path, straight.config, straight.model, straight.optimizer, 3, {})
    expected = [straight.step(number) for number in range(3, 6)]
    weights = straight.weights()
    states = straight.optimizer.optimizer.chained_optimizers[0].optimizer.state.values()
    assert all(values["exp_avg"].dtype == torch.float32 for values in states)
    restored = Run(seed + 1, then)
    restored.step(7)
    load_checkpoint(find_checkpoint(tmp_path), restored.config, restored.model, restored.optimizer)
    outcomes = [restored.step(number) for number in range(3, 6)]
    if then is OFFLOAD:
        assert outcomes == expected
        assert_equal_tensors(restored.weights(), weights)
    else:
        assert [norm for norm, _ in outcomes] == pytest.approx([norm for norm, _ in expected], rel=1e-3)
        for name, values in restored.weights().items():
            torch.testing.assert_close(values.float(), weights[name].float(), rtol=1e-2, atol=1e-3)


def test_loaded_states_are_where_their_parameters_are_updated() -> None:
    """Megatron takes PyTorch's optimizer of the GPU for one of the host; "meta" stands for the GPU."""
    tensors = {"cpu": torch.zeros(3), "meta": torch.zeros(3, device="meta")}
    parameters = {device: torch.zeros(3, dtype=torch.bfloat16) for device in tensors}
    state = {
        parameter: {"exp_avg": torch.zeros(3), "step": torch.tensor(2.0), "master_param": tensors[device]}
        for device, parameter in parameters.items()
    }
    inner = {parameter: tensors[device] for device, parameter in parameters.items()}
    hybrid = SimpleNamespace(state=state, param_to_inner_param=inner, param_groups=[{"step": 2}], gpu_optimizer=None)
    _put_beside_parameters(hybrid, [2])
    for device, parameter in parameters.items():
        assert {value.device.type for value in state[parameter].values()} == {device}
        assert state[parameter]["master_param"] is tensors[device]


def test_the_gradient_buffer_has_the_dtype_asked_for(bfloat16_is_a_gpu: None) -> None:
    for dtype, expected in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        run = Run(1, replace(OFFLOAD, main_grads_dtype=dtype))
        assert {buffer.grad_dtype for buffer in run.optimizer.chunks[0].buffers} == {expected}
        before = run.weights()
        assert run.step(2)[1]
        assert all(not torch.equal(values, before[name]) for name, values in run.weights().items())


def test_the_machine_is_asked_before_anything_is_built() -> None:
    aware = replace(RATES, use_precision_aware_optimizer=True)
    engine = replace(MODEL, transformer_impl="transformer_engine", fp8_format="hybrid")
    check_state_support(MODEL, RATES)
    if not torch.cuda.is_available():
        with pytest.raises(InputError, match="--optimizer-cpu-offload needs a CUDA GPU"):
            check_state_support(MODEL, OFFLOAD)
    try:
        import transformer_engine  # noqa: F401
    except ImportError:
        with pytest.raises(InputError, match="--use-precision-aware-optimizer needs the package transformer_engine"):
            check_state_support(MODEL, aware)
        with pytest.raises(InputError, match="--fp8-format needs the package transformer_engine"):
            check_state_support(engine, RATES)


def _bytes(tensors: list[torch.Tensor]) -> int:
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)


def test_training_goes_on_bit_for_bit_after_an_offload():
    seed = int(seed_all(5).integers(1 << 30))
    plain = Run(seed, RATES)
    expected = [plain.step(number) for number in range(4)]
    expected_weights = plain.weights()

    run = Run(seed, RATES)
    losses = [run.step(number) for number in range(2)]
    weights = [parameter.data for parameter in run.model.parameters()]
    states, gradients = run.optimizer.state_tensors(), run.optimizer.gradient_buffers()
    # bfloat16 weights have master weights and two moments in float32.
    assert _bytes(states) >= 6 * _bytes([weight.clone() for weight in weights])
    storages = [HostStorages(weights), HostStorages(states), HostStorages(gradients, keep=False)]
    for part in storages:
        part.to_host()
        part.to_host()
    assert _bytes(weights) == _bytes(states) == _bytes(gradients) == 0
    for part in storages:
        part.to_device()
        part.to_device()
    assert not any(buffer.any() for buffer in gradients)
    losses += [run.step(number) for number in range(2, 4)]
    assert losses == expected
    assert_equal_tensors(run.weights(), expected_weights)


@pytest.mark.parametrize("constant", [False, True])
def test_views_see_their_values_again(constant: bool):
    whole = torch.arange(24.0).reshape(4, 6)
    parts = [whole[1], whole[:, 2], torch.arange(3)]
    before = [part.clone() for part in parts]
    storages = HostStorages(parts, constant=constant)
    for _ in range(2):
        storages.to_host()
        assert not storages.on_device
        assert whole.untyped_storage().nbytes() == 0
        storages.to_device()
        assert all(torch.equal(part, values) for part, values in zip(parts, before, strict=True))
        assert torch.equal(whole, torch.arange(24.0).reshape(4, 6))
