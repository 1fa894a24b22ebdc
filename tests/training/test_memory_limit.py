"""Memory limits: bytes that stay, gradients that do not depend on them, what a trainer decides on a GPU by itself."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import megatron_dta.training.autotune as autotune
from conftest import seed_all
from megatron_dta.core.common.errors import InputError
from megatron_dta.core.config import ModelConfig, ObjectiveConfig, ParallelConfig, TreeConfig
from megatron_dta.core.engine import TreeEngine, prepare_batch
from megatron_dta.core.model.build import build_model
from megatron_dta.core.model.parallel.mesh import initialize_parallel
from megatron_dta.core.objectives.registry import make_objective
from megatron_dta.core.planning.costs.gpus import LayerSplit, gpu_cost_model, gpu_named
from megatron_dta.core.planning.costs.memory_budget import GIB
from megatron_dta.core.planning.step.sample import TrainingSample
from megatron_dta.core.rollouts.load import write_rollouts
from megatron_dta.training.arguments import parse_arguments
from megatron_dta.training.autotune import GpuMemory, decides_memory
from megatron_dta.training.config import OptimizationConfig
from megatron_dta.training.constant_memory import constant_bytes
from megatron_dta.training.loop import Trainer
from megatron_dta.training.optimizer.build import TrainingOptimizer, data_parallel_chunks
from trainer_cases import MODEL, make_rollouts, make_trainer, rows_of
from tree_engine_cases import model_config


def tiny_model(dtype: torch.dtype = torch.float64) -> ModelConfig:
    sizes = dict(hidden_size=16, ffn_hidden_size=32, kv_channels=4, vocab_size=40, max_position_embeddings=4096)
    return model_config(dtype, init_method_std=0.02, **sizes)


def test_gradients_do_not_depend_on_the_memory() -> None:
    generator = seed_all(7)
    trunk = generator.integers(0, 40, 150)
    samples = []
    for _ in range(4):
        tokens = torch.cat([torch.tensor(trunk), torch.tensor(generator.integers(0, 40, 75))]).numpy().astype("int32")
        mask = generator.random(225) < 0.3
        mask[0], mask[-1] = False, True
        samples.append(TrainingSample(tokens, mask))
    model = build_model(tiny_model(), initialize_parallel(1))
    objective = make_objective(ObjectiveConfig(objective="sft"))

    def gradients(engine: TreeEngine, tree: TreeConfig) -> tuple[list[torch.Tensor], int, int]:
        model.zero_grad()
        batch = prepare_batch(samples, tree, pipeline=engine.pipeline(tree.tree_segment_tokens))
        result = engine.forward_backward(batch, objective)
        gradients = [p.grad.clone() for p in model.parameters()]
        return gradients, result.recomputed_tokens, batch.plan.segments.num_segments

    engine = TreeEngine(model, logprob_chunk_tokens=8)
    expected, none, _ = gradients(engine, TreeConfig(tree_segment_tokens=32))
    assert none == 0
    constant = constant_bytes([model])
    tree = TreeConfig(tree_segment_tokens=32, tree_memory_gib=1e-6)
    engine.limit_memory(1e-6, constant)
    with pytest.raises(InputError, match="GiB too small"):
        gradients(engine, tree)
    recomputed = []
    for extra in (0.6e6, 0.75e6, 4e6):
        engine.limit_memory((constant + extra) / GIB, constant)
        computed, again, segments = gradients(engine, tree)
        recomputed.append(again)
        assert segments > 1
        for one, other in zip(computed, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-13)
    assert recomputed[0] > recomputed[-1] == 0
    with pytest.raises(ValueError, match="limit_memory"):
        prepare_batch(samples, tree)


@pytest.mark.parametrize(("dtype", "bytes_each"), [(torch.float32, 4 + 4 + 8), (torch.bfloat16, 2 + 4 + 12)])
def test_bytes_that_stay_the_same(dtype: torch.dtype, bytes_each: int) -> None:
    model = build_model(tiny_model(dtype), initialize_parallel(1))
    count = sum(p.numel() for p in model.parameters())
    settings, without = OptimizationConfig(lr=1e-3, train_iters=1), 6 if dtype == torch.bfloat16 else 8
    chunks = data_parallel_chunks(model, ParallelConfig())
    assert constant_bytes(chunks, settings) == bytes_each * count
    assert constant_bytes(chunks, settings, 4) == (without + (bytes_each - without) / 4) * count
    assert constant_bytes(chunks) == without * count
    offloaded = replace(settings, optimizer_cpu_offload=True, optimizer_offload_fraction=0.75, exp_avg_dtype="bf16")
    states = bytes_each - without if dtype == torch.float32 else 4 + 2 + 4
    assert constant_bytes(chunks, offloaded) == (without + states / 4) * count
    frozen = build_model(tiny_model(dtype), initialize_parallel(1)).requires_grad_(False)
    assert constant_bytes([frozen]) == count * dtype.itemsize
    # What Adam really holds after a step.
    if dtype == torch.float32:
        optimizer = TrainingOptimizer(model, settings)
        optimizer.zero_grad()
        for parameter in model.parameters():
            parameter.main_grad.fill_(1.0)
        optimizer.step(0.0)
        (adam,) = getattr(optimizer.optimizer, "chained_optimizers", [optimizer.optimizer])
        states = [v for s in adam.optimizer.state.values() for k, v in s.items() if k != "step"]
        assert sum(v.numel() * v.element_size() for v in states if torch.is_tensor(v)) == 8 * count


@pytest.mark.parametrize(
    ("flags", "decides"),
    [
        ("", True),
        ("--tree-segment-tokens 64", True),
        ("--tree-mode packed", False),
        ("--tree-memory-gib 9", False),
        ("--tree-activation-tokens 0", False),
    ],
)
def test_a_flag_that_limits_memory_is_obeyed(flags: str, decides: bool) -> None:
    config = parse_arguments(f"{MODEL} --rollouts r.jsonl --global-batch-size 12 --train-iters 1 {flags}".split())
    model = SimpleNamespace(config=SimpleNamespace(num_moe_experts=None, mixer=None))
    assert decides_memory(config, SimpleNamespace(device=torch.device("cuda"), tree_models=[model])) is decides
    assert not decides_memory(config, SimpleNamespace(device=torch.device("cpu"), tree_models=[model]))


class TimedEngine(TreeEngine):
    """An engine whose device is taken for an H200."""

    has_device_costs = True

    def cost_model(self, segment_tokens: int | None):
        model = gpu_cost_model(self.shape, gpu_named("NVIDIA H200")[0], LayerSplit(), segment_tokens or 8192)
        return self.correction.apply(model)


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> list[GpuMemory]:
    """A trainer on the CPU decides as on a GPU with this memory; the entry may be replaced."""
    current = [GpuMemory(total=20 * GIB, outside=GIB, graphs=0.0, others=0.0)]
    monkeypatch.setattr(autotune, "decides_memory", lambda config, device: config.tree.tree_memory_gib is None)
    monkeypatch.setattr(autotune, "measure_gpu", lambda device, states, graphs=None: current[0])
    monkeypatch.setattr("megatron_dta.wiring.setup.TreeEngine", TimedEngine)
    return current


@pytest.fixture
def rollouts(tmp_path: Path) -> Path:
    path = tmp_path / "r.jsonl"
    write_rollouts(path, make_rollouts(seed_all(5), 4, 3))
    return path


def steps(trainer: Trainer, count: int) -> list[dict]:
    return [trainer._step() for _ in range(count)]


def test_the_limit_follows_others_until_the_second_step_and_then_only_falls(
    memory: list[GpuMemory], rollouts: Path
) -> None:
    trainer, output = make_trainer(f"--rollouts {rollouts} --global-batch-size 12 --train-iters 9")
    assert trainer.tuner.limit == trainer.engine.memory.gib == 18
    assert "at most 18 GiB with a step (20.0 on the GPU, less 1.0 outside PyTorch, less 4% margin" in output.getvalue()
    limits = []
    for held in (4, 3, 2, 6, 5):
        memory[0] = replace(memory[0], outside=held * GIB)
        steps(trainer, 1)
        limits.append(trainer.engine.memory.gib)
    assert limits == [15, 16, 16, 13, 13]


def test_a_lower_limit_plans_waiting_steps_again(memory: list[GpuMemory], rollouts: Path) -> None:
    trainer, _ = make_trainer(f"--rollouts {rollouts} --global-batch-size 12 --train-iters 9 --ppo-epochs 3")
    steps(trainer, 1)
    before = [step.planned for step in trainer.progress.waiting]
    assert len(before) == 2
    assert all(before)
    memory[0] = replace(memory[0], others=3.5 * GIB)
    steps(trainer, 1)
    assert trainer.progress.waiting[0].planned is not before[1]


def test_the_second_step_corrects_the_costs_once(memory: list[GpuMemory], rollouts: Path) -> None:
    trainer, _ = make_trainer(f"--rollouts {rollouts} --global-batch-size 12 --train-iters 9 --tree-segment-tokens 4")
    uncorrected = trainer.engine.correction
    steps(trainer, 1)
    assert trainer.engine.correction == uncorrected
    steps(trainer, 1)
    corrected = trainer.engine.correction
    # Segments of 4 tokens are all launch: a CPU launches two small layers faster or slower than a GPU's host.
    assert corrected.forward_floor != 1
    assert corrected.backward_floor != 1
    assert corrected.forward_work == 1
    steps(trainer, 1)
    assert trainer.engine.correction == corrected


def test_a_deterministic_run_follows_no_clock(memory: list[GpuMemory], rollouts: Path) -> None:
    trainer, _ = make_trainer(
        f"--rollouts {rollouts} --global-batch-size 12 --train-iters 9 --tree-segment-tokens 4 --deterministic-mode"
    )
    uncorrected = trainer.engine.correction
    steps(trainer, 2)
    assert trainer.engine.correction == uncorrected
    assert trainer.tuner.limit == 18


class Failing:
    """``forward_backward`` of an engine that runs out of memory ``failures`` times, after it has added gradients."""

    def __init__(self, engine: TreeEngine, failures: int) -> None:
        self.run, self.failures, self.limits = engine.forward_backward, failures, []
        self.engine = engine

    def __call__(self, batch, objective, **more):
        result = self.run(batch, objective, **more)
        self.limits.append(self.engine.memory and self.engine.memory.gib)
        if len(self.limits) <= self.failures:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return result


def test_a_step_that_runs_out_of_memory_is_planned_again_with_less(memory: list[GpuMemory], rollouts: Path) -> None:
    arguments = f"--rollouts {rollouts} --global-batch-size 12 --train-iters 3 --seed 3"
    twin, _ = make_trainer(arguments)
    trainer, output = make_trainer(arguments)
    failing = trainer.engine.forward_backward = Failing(trainer.engine, 1)
    for expected, record in zip(steps(twin, 3), steps(trainer, 3), strict=True):
        assert record["loss"] == expected["loss"]
        assert record["grad_norm"] == expected["grad_norm"]
    for one, other in zip(twin.model.parameters(), trainer.model.parameters(), strict=True):
        assert torch.equal(one, other)
    assert failing.limits == [18, 15, 15, 15]
    assert "ran out of GPU memory: planning it again within 15 GiB instead of 18" in output.getvalue()


def test_a_second_failure_ends_the_run_with_the_flag_that_helps(memory: list[GpuMemory], rollouts: Path) -> None:
    trainer, _ = make_trainer(f"--rollouts {rollouts} --global-batch-size 12 --train-iters 3")
    trainer.engine.forward_backward = Failing(trainer.engine, 2)
    with pytest.raises(InputError, match=r"ran out of GPU memory; lower --tree-memory-gib \(it was 15\)"):
        steps(trainer, 1)
    given, _ = make_trainer(f"--rollouts {rollouts} --global-batch-size 12 --train-iters 3 --tree-memory-gib 7")
    given.engine.forward_backward = Failing(given.engine, 1)
    with pytest.raises(InputError, match=r"ran out of GPU memory; lower --tree-memory-gib \(it was 7\)"):
        steps(given, 1)


def test_ranks_that_others_wait_for_leave_a_lower_limit(
    memory: list[GpuMemory], rollouts: Path, tmp_path: Path
) -> None:
    arguments = f"--rollouts {rollouts} --global-batch-size 12 --train-iters 3"
    folder = tmp_path / "run"
    trainer, _ = make_trainer(f"{arguments} --save {folder}")
    engine = trainer.engine
    trainer.tuner._engine = SimpleNamespace(mesh=replace(engine.mesh, world_size=2), memory=engine.memory)
    batch = SimpleNamespace(plan=SimpleNamespace(segments=SimpleNamespace(tree=SimpleNamespace(num_tokens=1234))))
    with pytest.raises(
        InputError, match=r"over 1,234 tokens .* the same command continues within 15 GiB instead of 18"
    ):
        trainer.tuner.retry(batch, torch.OutOfMemoryError())
    trainer.metrics.close()
    again, output = make_trainer(f"{arguments} --save {folder}")
    assert again.tuner.limit == again.engine.memory.gib == 15
    assert "at most 15 GiB with a step" in output.getvalue()
    again.metrics.close()
    (folder / "memory_limit.json").write_text('{"memory_gib": "much"}')
    with pytest.raises(
        InputError, match=r"memory_limit\.json: memory_gib must be a whole number above 0; delete the file"
    ):
        make_trainer(f"{arguments} --save {folder}")


def test_a_model_too_large_for_the_gpu_is_refused_in_one_line(memory: list[GpuMemory], rollouts: Path) -> None:
    memory[0] = replace(memory[0], others=18.5 * GIB)
    trainer, _ = make_trainer(f"--rollouts {rollouts} --global-batch-size 12 --train-iters 3")
    with pytest.raises(InputError, match=r"^GPU memory \(-?\d+ GiB for tensors\) is .* too small: .*more ranks"):
        steps(trainer, 1)


def test_a_continued_run_decides_as_before(memory: list[GpuMemory], rollouts: Path, tmp_path: Path) -> None:
    arguments = f"--rollouts {rollouts} --global-batch-size 12 --tree-segment-tokens 4 --save {tmp_path}/run"
    first, _ = make_trainer(f"{arguments} --train-iters 2")
    memory[0] = replace(memory[0], others=2.5 * GIB)
    first.run()
    first.metrics.close()
    memory[0] = replace(memory[0], others=0.0)
    second, _output = make_trainer(f"{arguments} --train-iters 4")
    assert second.tuner.limit == first.tuner.limit == 15
    assert second.engine.correction == first.engine.correction
    second.run()
    second.metrics.close()
    assert second.tuner.limit == 15
    assert second.engine.correction == first.engine.correction
    assert len(rows_of(tmp_path / "run" / "metrics.jsonl")) == 4
    # On other GPUs it decides afresh.
    memory[0] = GpuMemory(total=40 * GIB, outside=GIB, graphs=0.0, others=0.0)
    third, _ = make_trainer(f"{arguments} --train-iters 9")
    assert third.tuner.limit == 37
