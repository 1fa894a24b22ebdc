"""Dtypes and places of optimizer states: what does not fit is refused; offloaded states train and resume as others do.

Megatron's offloading optimizer needs a GPU. Here bfloat16 tensors pass for a GPU's and float32 ones for the host's,
which is how that optimizer uses the two when everything is offloaded; its own code runs unchanged.
"""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer

from conftest import seed_all
from megatron_dta.core.common.errors import InputError
from megatron_dta.core.model.parallel import megatron_patches
from megatron_dta.training.arguments import parse_arguments
from megatron_dta.training.checkpoint.files import find_checkpoint
from megatron_dta.training.checkpoint.save_load import load_checkpoint, save_checkpoint
from megatron_dta.training.config import OptimizationConfig
from megatron_dta.training.config.checks.optimizer_states import check_state_support, check_states
from megatron_dta.training.optimizer import build as optimizer_module
from megatron_dta.training.optimizer.build import _put_beside_parameters
from optimizer_states_cases import MODEL, RATES, SHARDED, Run

OFFLOAD = replace(RATES, use_precision_aware_optimizer=True, optimizer_cpu_offload=True, no_pin_cpu_grads=True)
_MODEL = "--num-layers 2 --hidden-size 24 --num-attention-heads 3 --vocab-size 37"
BASE = shlex.split(f"{_MODEL} --rollouts x.jsonl --global-batch-size 2")
AWARE = ["--bf16", "--use-distributed-optimizer", "--use-precision-aware-optimizer"]


@pytest.fixture
def bfloat16_is_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda self: self.dtype == torch.bfloat16), raising=False)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self, *_: self)
    # Nothing ever waits for a stream that runs nothing.
    monkeypatch.setattr(megatron_patches._NoStream, "wait", lambda self, stream: None, raising=False)


def assert_same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    for name, values in left.items():
        assert torch.equal(values, right[name]), name


def test_offloaded_states_train_as_others(bfloat16_is_a_gpu: None) -> None:
    seed = int(seed_all(3).integers(1 << 30))
    plain = Run(seed, RATES)
    before = plain.weights()
    expected = [plain.step(number) for number in range(4)]
    there = plain.weights()
    offloaded = Run(seed, OFFLOAD)
    found = [offloaded.step(number) for number in range(4)]
    assert [applied for _, applied in found] == [True] * 4
    assert [norm for norm, _ in found] == pytest.approx([norm for norm, _ in expected], rel=1e-3)
    states = offloaded.optimizer.optimizer.chained_optimizers[0].optimizer.state.values()
    assert all(values["exp_avg"].dtype == torch.float32 for values in states)
    for name, values in offloaded.weights().items():
        assert not torch.equal(values, before[name])
        torch.testing.assert_close(values.float(), there[name].float(), rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("then", [OFFLOAD, RATES], ids=["offloaded", "on the GPU"])
def test_a_run_with_offloaded_states_resumes(bfloat16_is_a_gpu: None, tmp_path: Path, then: OptimizationConfig) -> None:
    seed = int(seed_all(4).integers(1 << 30))
    straight = Run(seed, OFFLOAD)
    for number in range(3):
        straight.step(number)
    save_checkpoint(tmp_path, straight.config, straight.model, straight.optimizer, 3, {})
    expected = [straight.step(number) for number in range(3, 6)]
    there = straight.weights()
    restored = Run(seed + 1, then)
    restored.step(7)
    load_checkpoint(find_checkpoint(tmp_path), restored.config, restored.model, restored.optimizer)
    found = [restored.step(number) for number in range(3, 6)]
    if then is OFFLOAD:
        assert found == expected
        assert_same(restored.weights(), there)
    else:
        assert [norm for norm, _ in found] == pytest.approx([norm for norm, _ in expected], rel=1e-3)


def test_a_fresh_process_resumes_offloaded_states(bfloat16_is_a_gpu: None, tmp_path: Path) -> None:
    straight = Run(8, OFFLOAD)
    for number in range(2):
        straight.step(number)
    save_checkpoint(tmp_path, straight.config, straight.model, straight.optimizer, 2, {})
    expected = straight.step(2)
    there = straight.weights()
    restored = Run(9, OFFLOAD)  # has not taken a step, and so no state
    load_checkpoint(find_checkpoint(tmp_path), restored.config, restored.model, restored.optimizer)
    assert restored.step(2) == expected
    assert_same(restored.weights(), there)


def test_loaded_states_are_where_their_parameters_are_updated() -> None:
    """Megatron takes PyTorch's optimizer of the GPU for one of the host; "meta" stands for the GPU."""
    places = {"cpu": torch.zeros(3), "meta": torch.zeros(3, device="meta")}
    parameters = {place: torch.zeros(3, dtype=torch.bfloat16) for place in places}
    state = {
        parameter: {"exp_avg": torch.zeros(3), "step": torch.tensor(2.0), "master_param": places[place]}
        for place, parameter in parameters.items()
    }
    inner = {parameter: places[place] for place, parameter in parameters.items()}
    hybrid = SimpleNamespace(state=state, param_to_inner_param=inner, param_groups=[{"step": 2}], gpu_optimizer=None)
    _put_beside_parameters(hybrid, [2])
    for place, parameter in parameters.items():
        assert {value.device.type for value in state[parameter].values()} == {place}
        assert state[parameter]["master_param"] is places[place]


class AdamOfGroups(torch.optim.Optimizer):
    """Counts its steps as Transformer Engine's Adam does; an update is as large as their number."""

    get_unscaled_state = None

    def __init__(self, groups: list, **defaults: object) -> None:
        super().__init__(groups, defaults)

    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for parameter in group["params"]:
                parameter.data.sub_(group["step"])


def test_an_optimizer_that_counts_in_groups_goes_on_counting(
    bfloat16_is_a_gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of the states on the host, the other beside parameters of two values, which pass for a GPU's."""
    on_gpu = property(lambda self: self.dtype == torch.bfloat16 or self.shape == (2,))
    monkeypatch.setattr(torch.Tensor, "is_cuda", on_gpu, raising=False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: megatron_patches._NoStream(), raising=False)
    parameters = [torch.nn.Parameter(torch.zeros(size, dtype=torch.bfloat16)) for size in (3, 2)]
    hybrid = HybridDeviceOptimizer(
        [{"params": parameters}],
        offload_fraction=0.5,
        cpu_optimizer_cls=torch.optim.AdamW,
        gpu_optimizer_cls=AdamOfGroups,
        param_update_in_fp32=True,
        overlap_cpu_optimizer_d2h_h2d=False,
        pin_cpu_grads=False,
    )
    hybrid.param_groups[0]["step"] = 4  # as Megatron leaves it when it has loaded four steps
    _put_beside_parameters(hybrid, [4])
    values = []
    for _ in range(2):
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        hybrid.step()
        values.append(float(parameters[1].detach()[0]))
    assert values == [-5.0, -11.0]


def test_the_gradient_buffer_has_the_dtype_asked_for(bfloat16_is_a_gpu: None) -> None:
    for dtype, expected in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        run = Run(1, replace(OFFLOAD, main_grads_dtype=dtype))
        assert {buffer.grad_dtype for buffer in run.optimizer.chunks[0].buffers} == {expected}
        before = run.weights()
        assert run.step(2)[1]
        assert all(not torch.equal(values, before[name]) for name, values in run.weights().items())


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--optimizer-cpu-offload", "--optimizer-cpu-offload needs --use-precision-aware-optimizer"),
        ("--use-precision-aware-optimizer --bf16", "needs --use-distributed-optimizer"),
        ("--use-precision-aware-optimizer --use-distributed-optimizer", "needs --bf16"),
        (" ".join(AWARE) + " --optimizer-cpu-offload --exp-avg-dtype bf16", "with --optimizer-cpu-offload the states"),
        (" ".join(AWARE) + " --exp-avg-dtype int8", "--exp-avg-dtype"),
        ("--fp8-format hybrid --bf16", "--fp8-format needs --transformer-impl transformer_engine"),
    ],
)
def test_what_does_not_fit_is_refused(flags: str, message: str) -> None:
    with pytest.raises(InputError, match=message) as error:
        parse_arguments([*BASE, *flags.split()])
    assert "\n" not in str(error.value)


def test_fp8_is_refused_beside_what_it_cannot_do() -> None:
    widths = dict(hidden_size=32, ffn_hidden_size=64, num_attention_heads=2, num_query_groups=2, kv_channels=16)
    engine = replace(MODEL, transformer_impl="transformer_engine", fp8_format="hybrid", fp8_recipe="tensorwise")
    engine = replace(engine, **widths)
    check_states(engine, RATES, SHARDED)
    with pytest.raises(InputError, match="--fp8-format needs --bf16"):
        check_states(replace(engine, bf16=False, params_dtype=torch.float32), RATES, SHARDED)
    with pytest.raises(InputError, match="--num-experts is not supported"):
        check_states(replace(engine, num_experts=4), RATES, SHARDED)


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


class CountsInGroups(torch.optim.SGD):
    """Keeps its number of steps as Transformer Engine's Adam does: an int in each group, and none in the states."""

    def get_unscaled_state(self) -> None:
        raise NotImplementedError


@pytest.mark.parametrize("steps", [[3.0], [torch.tensor(3.0)], [3], []])
def test_steps_are_loaded_to_where_an_optimizer_counts_them(steps: list) -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    loads = []
    for adam in (CountsInGroups([parameter], lr=0.1), torch.optim.AdamW([parameter], lr=0.1)):
        wrapper = SimpleNamespace(optimizer=adam, load_state_dict=loads.append)
        optimizer_module._load(wrapper, {"optimizer": {"state": {"common_step": 9}, "param_groups": []}}, steps)
    in_groups, in_states = (loaded["optimizer"] for loaded in loads)
    assert in_groups["state"] == {}
    assert [type(group.get("step")) for group in in_groups["param_groups"]] == [int if steps else type(None)]
    assert "step" not in in_states["param_groups"][0]
    assert in_states["state"] == ({"common_step": torch.tensor(3.0)} if steps else {})
