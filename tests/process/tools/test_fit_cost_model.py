"""``tools/fit_cost_model.py`` as a user runs it, its file in the step benchmark, and memory limits in the engine."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from arguments_cases import MODEL, STORED
from conftest import REPOSITORY, seed_all
from forked import run_python
from megatron_dta.arguments import parse_arguments
from megatron_dta.common.errors import InputError
from megatron_dta.config import ModelConfig, ObjectiveConfig, OptimizationConfig, ParallelConfig, TreeConfig
from megatron_dta.config.derived.benchmark_model import benchmark_model
from megatron_dta.engine import TreeEngine, prepare_batch
from megatron_dta.engine.cost_inputs import cost_shape, decoder_shape
from megatron_dta.model import build_model, initialize_parallel
from megatron_dta.objectives import make_objective
from megatron_dta.planning.costs.file import CostFile, PassSeconds, load_cost_file
from megatron_dta.planning.costs.memory_budget import GIB
from megatron_dta.planning.step.sample import TrainingSample
from megatron_dta.rollouts import write_rollouts
from megatron_dta.training.constant_memory import constant_bytes
from megatron_dta.training.optimizer import TrainingOptimizer, data_parallel_chunks
from trainer_cases import make_rollouts, make_trainer

FIT = str(REPOSITORY / "tools" / "fit_cost_model.py")
STEP = str(REPOSITORY / "benchmarks" / "train.py")


def run(tool: str, *arguments: object) -> subprocess.CompletedProcess:
    command = [tool, *map(str, arguments)]
    return run_python(command)


def error_of(done: subprocess.CompletedProcess) -> str:
    assert done.returncode == 2, done.stderr[-2000:]
    line = done.stderr.splitlines()[-1]
    assert line.startswith("error: ")
    return line


def tiny_model(dtype: torch.dtype = torch.float64) -> ModelConfig:
    return ModelConfig(
        num_layers=2,
        hidden_size=16,
        ffn_hidden_size=32,
        num_attention_heads=4,
        group_query_attention=True,
        num_query_groups=2,
        kv_channels=4,
        vocab_size=40,
        swiglu=True,
        disable_bias_linear=True,
        params_dtype=dtype,
    )


def test_fitted_on_this_machine_and_used_for_a_step(tmp_path: Path) -> None:
    rollouts = make_rollouts(seed_all(3), 6, 4)
    write_rollouts(tmp_path / "rollouts.jsonl", rollouts)
    vocabulary = 1 + max(int(each.token_ids.max()) for each in rollouts)
    output = tmp_path / "costs.json"
    arguments = ("--model", "tiny", "--max-length", 256, "--repeats", 1, "--vocab-size", vocabulary)
    done = run(FIT, *arguments, "--output", output)
    assert done.returncode == 0, done.stderr[-2000:]
    content = json.loads(output.read_text())
    assert {"hardware", "date", "command", "commit", "errors", "measurements", "settings"} <= content.keys()
    assert {op["layers"] for op in content["measurements"]} == {1, 2}
    assert {op["kind"] for op in content["measurements"]} == {"forward", "backward", "recompute"}
    assert {op["tokens"] for op in content["measurements"]} == {2, 4, 8, 16, 32, 64}
    assert max(op["path_tokens"] for op in content["measurements"]) > 200
    found = load_cost_file(output)
    assert (found.num_layers, found.shape.vocab_size, found.shape.dtype) == (2, vocabulary, "float32")
    assert found.bytes is None
    assert json.loads(done.stdout.splitlines()[-1])["forward"] == content["forward"]
    assert not list(tmp_path.glob("*.tmp"))
    again = tmp_path / "again.json"
    done = run(FIT, "--refit", output, "--output", again)
    assert done.returncode == 0, done.stderr[-2000:]
    fitted = json.loads(again.read_text())
    assert fitted.pop("refitted")["command"] == "--refit costs.json"
    assert fitted == content

    step = (tmp_path / "rollouts.jsonl", "--model", "tiny", "--steps", 1, "--tree-mode", "dta", "--json")
    done = run(STEP, *step, "--cost-model", output)
    assert done.returncode == 0, done.stderr[-2000:]
    row = json.loads(done.stdout.splitlines()[-1])["rows"][0]
    assert row["predicted_seconds"] > 0
    assert row["prediction_error"] == pytest.approx(row["predicted_seconds"] / row["seconds"] - 1)
    # Everything fits into a segment of the least size that is tried.
    assert (row["segments"], row["segment_tokens"]) == (1, 256)
    line = error_of(run(STEP, *step, "--cost-model", output, "--bf16"))
    assert "was measured with dtype float32, but the model has bfloat16" in line

    line = error_of(run(STEP, *step, "--tree-memory-gib", 0.001))
    assert "--tree-memory-gib 0.001 is " in line
    enough = re.search(r"set it to ([0-9.]+) or more", line)[1]
    done = run(STEP, *step, "--tree-memory-gib", enough)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--output", "c.json"), "--model"),
        (("--model", "qwen4", "--output", "c.json"), "--model"),
        (("--model", "tiny"), "--output"),
        (("--output", "c.json"), "--model is needed"),
        (("--refit", "c.json", "--output", "d.json", "--bf16"), "--bf16 has no effect with --refit"),
        (("--refit", "c.json", "--output", "d.json", "--repeats", "4"), "--repeats has no effect with --refit"),
        (("--model", "tiny", "--output", "no/folder/c.json"), "its folder does not exist"),
        (("--model", "tiny", "--output", "c.json", "--num-layers", "1"), "two depths"),
        (("--model", "tiny", "--output", "c.json", "--num-layers", "3"), "tiny has only 2"),
        (("--model", "tiny", "--output", "c.json", "--max-length", "300"), "--max-length 300"),
        (("--model", "tiny", "--output", "c.json", "--repeats", "0"), "--repeats"),
        (("--model", "tiny", "--output", "c.json", "--vocab-size", "1"), "--vocab-size"),
    ],
)
def test_bad_flags_get_one_line(arguments: tuple, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron_dta.commands import fit_cost_model as fit_cost_model

    monkeypatch.setattr(sys, "argv", ["fit_cost_model.py", *arguments])
    with pytest.raises(InputError, match=message):
        fit_cost_model.parse_arguments()


def test_gradients_do_not_depend_on_the_memory() -> None:
    generator = seed_all(7)
    trunk = generator.integers(0, 40, 300)
    samples = []
    for _ in range(4):
        tokens = torch.cat([torch.tensor(trunk), torch.tensor(generator.integers(0, 40, 150))]).numpy().astype("int32")
        mask = generator.random(450) < 0.3
        mask[0], mask[-1] = False, True
        samples.append(TrainingSample(tokens, mask))
    model = build_model(tiny_model(), initialize_parallel(1))
    objective = make_objective(ObjectiveConfig(objective="sft"))

    def gradients(engine: TreeEngine, tree: TreeConfig) -> tuple[list[torch.Tensor], int, int]:
        model.zero_grad()
        batch = prepare_batch(samples, tree, pipeline=engine.pipeline(tree.tree_segment_tokens))
        result = engine.forward_backward(batch, objective)
        found = [p.grad.clone() for p in model.parameters()]
        return found, result.recomputed_tokens, batch.plan.segments.num_segments

    engine = TreeEngine(model, logprob_chunk_tokens=8)
    expected, none, _ = gradients(engine, TreeConfig(tree_segment_tokens=64))
    assert none == 0
    constant = constant_bytes([model])
    tree = TreeConfig(tree_segment_tokens=64, tree_memory_gib=1e-6)
    engine.limit_memory(1e-6, constant)
    with pytest.raises(InputError, match="GiB too small"):
        gradients(engine, tree)
    recomputed = []
    for extra in (1.2e6, 1.5e6, 8e6):
        engine.limit_memory((constant + extra) / GIB, constant)
        found, again, segments = gradients(engine, tree)
        recomputed.append(again)
        assert segments > 1
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-13)
    assert recomputed[0] > recomputed[-1] == 0
    with pytest.raises(ValueError, match="limit_memory"):
        prepare_batch(samples, tree)


def test_costs_of_experts_are_those_of_their_sizes_and_ranks(tmp_path: Path) -> None:
    output = tmp_path / "costs.json"
    done = run(
        FIT, *("--model", "tiny-moe", "--max-length", 256, "--repeats", 1, "--vocab-size", 40, "--output", output)
    )
    assert done.returncode == 0, done.stderr[-2000:]
    costs = load_cost_file(output)
    initialize_parallel(1)
    model = build_model(
        replace(benchmark_model("tiny-moe", 40, 256, False), moe_grouped_gemm=True), torch.device("cpu")
    )
    engine = TreeEngine(model, costs=costs)
    assert engine.cost_model(None).seconds_per_token == costs.model().seconds_per_token > 0
    for name, flag in (
        ("num_experts", "--num-experts 4"),
        ("expert_model_parallel_size", "--expert-model-parallel-size 4"),
    ):
        other = replace(costs, shape=replace(costs.shape, **{name: 4}))
        with pytest.raises(InputError, match=f"was measured with {flag}, but the model has"):
            TreeEngine(model, costs=other)
    content = json.loads(output.read_text())
    content["shape"] = {
        key: value for key, value in content["shape"].items() if "expert" not in key and "moe" not in key
    }
    output.write_text(json.dumps(content))
    assert load_cost_file(output).shape.num_experts == 0
    with pytest.raises(InputError, match="was measured with --"):
        TreeEngine(model, costs=load_cost_file(output))


def test_costs_of_another_model_are_refused_by_the_engine() -> None:
    model = build_model(tiny_model(torch.float32), initialize_parallel(1))
    shape = cost_shape(model.config, decoder_shape(model.config, 40), torch.float32)
    costs = CostFile("c.json", shape, 5, PassSeconds(1.0, edge=0.5), PassSeconds(2.0, floor_and_layer=3.0))
    engine = TreeEngine(model, costs=costs)
    assert engine.cost_model(None).seconds_per_token == 2 * 3.0
    assert engine.cost_model(100).floor_seconds == 2 * 3.0
    assert engine.pipeline(None).is_measured
    with pytest.raises(InputError, match=r"--cost-model c\.json: was measured with --hidden-size 24"):
        TreeEngine(model, costs=replace(costs, shape=replace(shape, hidden_size=24)))


@pytest.mark.parametrize(("dtype", "each"), [(torch.float32, 4 + 4 + 8), (torch.bfloat16, 2 + 4 + 12)])
def test_bytes_that_stay_the_same(dtype: torch.dtype, each: int) -> None:
    model = build_model(tiny_model(dtype), initialize_parallel(1))
    count = sum(p.numel() for p in model.parameters())
    settings, without = OptimizationConfig(lr=1e-3, train_iters=1), 6 if dtype == torch.bfloat16 else 8
    chunks = data_parallel_chunks(model, ParallelConfig())
    assert constant_bytes(chunks, settings) == each * count
    assert constant_bytes(chunks, settings, 4) == (without + (each - without) / 4) * count
    assert constant_bytes(chunks) == without * count
    offloaded = replace(settings, optimizer_cpu_offload=True, optimizer_offload_fraction=0.75, exp_avg_dtype="bf16")
    states = each - without if dtype == torch.float32 else 4 + 2 + 4
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
    ("line", "message"),
    [
        (
            f"{STORED} --tree-memory-gib 8 --tree-memory-tokens 100",
            "--tree-memory-gib conflicts with --tree-memory-tokens",
        ),
        (f"{STORED} --tree-memory-gib 8 --tree-activation-tokens 0", "conflicts with --tree-activation-tokens 0"),
        (
            f"{STORED} --tree-memory-gib 8 --recompute-granularity selective",
            "conflicts with --recompute-granularity selective",
        ),
        (f"{STORED} --tree-memory-gib 0", "--tree-memory-gib 0.0: must be above 0"),
        (
            f"{STORED} --tree-memory-gib 8 --num-experts 4",
            "--tree-memory-gib 8: supports experts with --moe-grouped-gemm only; add it",
        ),
        (
            f"{STORED} --cost-model c.json --num-experts 4",
            "--cost-model c.json: supports experts with --moe-grouped-gemm only; add it",
        ),
    ],
)
def test_settings_that_do_not_fit_together(line: str, message: str) -> None:
    with pytest.raises(InputError, match=re.escape(message)):
        parse_arguments(line.split())
    assert MODEL in line


def test_training_within_a_memory_limit(tmp_path: Path) -> None:
    write_rollouts(tmp_path / "r.jsonl", make_rollouts(seed_all(5), 4, 4))
    line = f"--rollouts {tmp_path}/r.jsonl --global-batch-size 16 --kl-loss-coef 0.1 --train-iters 1 "
    costs = f"--cost-model {tmp_path}/costs.json"
    trainer, _ = make_trainer(f"{line} --tree-memory-gib 2")
    engine, parts = trainer.engine, trainer.optimizer.chunks
    frozen = sum(p.numel() * p.element_size() for p in trainer.model.parameters())
    assert engine.memory.gib == 2
    assert engine.memory.constant == (constant_bytes(parts, trainer.config.optimization) + frozen,), (
        "the reference's weights count too"
    )
    shape = cost_shape(engine.config, engine.shape, engine.dtype)
    content = CostFile("c", shape, 2, PassSeconds(1.0, edge=0.5), PassSeconds(2.0)).as_json()
    (tmp_path / "costs.json").write_text(json.dumps(content))
    trainer, _ = make_trainer(f"{line} --tree-memory-gib 2 {costs}")
    assert trainer.engine.costs.shape == shape
    trainer.run()
    trainer.metrics.close()
    content["shape"]["kv_channels"] += 1
    (tmp_path / "costs.json").write_text(json.dumps(content))
    with pytest.raises(InputError, match="was measured with --kv-channels"):
        make_trainer(f"{line} {costs}")
    with pytest.raises(InputError, match="cannot be read"):
        make_trainer(f"{line} --cost-model {tmp_path}/none.json")
    trainer, _ = make_trainer(f"{line} --tree-memory-gib 0.001")
    with pytest.raises(InputError, match="GiB too small"):
        trainer.run()
