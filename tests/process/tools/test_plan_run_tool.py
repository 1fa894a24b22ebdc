"""``tools/plan_run.py`` as a user runs it, and the argument files of large models through the real parser."""

import json
import shlex
import subprocess
from dataclasses import fields
from pathlib import Path

import pytest

from conftest import REPOSITORY, rollout_file
from megatron_dta.core.common.errors import InputError
from megatron_dta.core.config import ModelConfig
from megatron_dta.core.shapes.decoder import DecoderShape
from megatron_dta.families.named_shapes import SHAPES
from megatron_dta.training.arguments import parse_arguments, parse_settings
from megatron_dta.training.huggingface.config.config import model_settings
from tool_runs import Tool

NUMBERS = ["--sequences", "64", "--unique-tokens", "120000", "--longest-path", "6000", "--samples-per-prompt", "8"]
EXAMPLES = {
    "llama3_70b": ("llama-3.1-70b", "llama3-70b", 32),
    "qwen2.5_72b": ("qwen2.5-72b", "qwen2.5-72b", 32),
    "qwen3_235b_a22b": ("qwen3-235b-a22b", "qwen3-235b-a22b", 128),
}
TOOL = Tool("plan_run")
# Settings of the run that override config.json.
OWN = ("max_position_embeddings", "init_method_std", "bf16", "params_dtype")


def planned(*arguments: object, status: int = 0) -> dict:
    done = TOOL(*arguments, "--json")
    assert done.returncode == status, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_the_best_mesh_is_a_command_that_training_takes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    values = planned(*NUMBERS, "--model", "qwen3-8b", "--num-gpus", 16, "--top", 2, "--gpu", "h100")
    assert len(values["best"]) == 2
    for row in values["best"]:
        assert sum(row["seconds"].values()) == pytest.approx(row["step_seconds"])
        assert sum(row["memory_gib"].values()) == pytest.approx(row["memory_total_gib"])
        assert row["memory_total_gib"] < 79
    torchrun, slurm = values["commands"]
    words = shlex.split(torchrun)
    monkeypatch.setenv("WORLD_SIZE", "16")
    words = words[words.index("megatron_dta.train") + 1 :]
    assert words[words.index("--load-hf") + 1] == "Qwen3-8B"
    folder = tmp_path / "Qwen3-8B"
    folder.mkdir()
    values_of_1_7b = json.loads((REPOSITORY / "tests" / "helpers" / "hf_configs" / "qwen3-1.7b.json").read_text())
    sizes = dict(num_hidden_layers=36, hidden_size=4096, intermediate_size=12288, num_attention_heads=32)
    (folder / "config.json").write_text(json.dumps(values_of_1_7b | sizes | {"tie_word_embeddings": False}))
    words[words.index("--load-hf") + 1] = str(folder)
    config = parse_arguments(words)
    assert DecoderShape.of(config.model) == SHAPES["qwen3-8b"]
    assert config.checkpoint.save == "runs/planned"
    mesh = values["best"][0]["mesh"]
    assert config.parallel.tensor_model_parallel_size == mesh["tensor"]
    assert config.parallel.pipeline_model_parallel_size == mesh["pipeline"]
    assert config.tree.tree_segment_tokens == values["best"][0]["tree_segment_tokens"]
    assert slurm.startswith("slurm/submit.sh train --nodes 2 --gpus-per-node 8 ")
    submit = ["bash", "slurm/submit.sh", "--dry-run", *shlex.split(slurm)[1:]]
    job = subprocess.run(submit, cwd=REPOSITORY, capture_output=True, text=True)
    assert job.returncode == 0, job.stderr
    assert "train.sbatch --bf16" in job.stdout


def test_what_does_not_fit_is_refused_with_the_part_that_is_largest() -> None:
    done = TOOL(*NUMBERS, "--model", "llama3-70b", "--num-gpus", 8, "--gpu", "a100", "--json")
    assert done.returncode == 1
    assert "nothing fits 79 GiB a GPU" in done.stdout
    assert "optimizer" in done.stdout
    values = json.loads(done.stdout.splitlines()[-1])
    assert values["best"] == values["commands"] == []
    nearest = values["misses"][0]
    assert nearest["missing_gib"] == pytest.approx(nearest["memory_total_gib"] - 0.94 * 79)
    # With its states on the hosts it does fit.
    states = ["--optimizer-offload-fraction", "1", "--main-grads-dtype", "bf16", "--tensor-model-parallel-size", "8"]
    offloaded = planned(*NUMBERS, "--model", "llama3-70b", "--num-gpus", 8, "--gpu", "a100", *states, "--top", 1)
    assert offloaded["best"][0]["host_gib"] > 50
    assert "--optimizer-cpu-offload" in offloaded["commands"][0]


def test_a_rollout_file_and_a_configuration() -> None:
    path = rollout_file("gsm8k_openai_4x400.npz")
    config = REPOSITORY / "tests" / "helpers" / "hf_configs" / "qwen3-1.7b.json"
    values = planned(path, "--max-sequences", 200, "--hf-config", config, "--num-gpus", 2, "--top", 1)
    assert values["parameters"] == 1_720_574_976
    assert values["sequences"] == 200
    assert values["unique_tokens"] < values["tokens"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--num-gpus", "8", "--model", "llama3-8b"], "give FILE, or numbers in its place: --sequences"),
        ([*NUMBERS, "--num-gpus", "8", "--model", "llama3-8b", "--tensor-model-parallel-size", "3"], "does not divide"),
    ],
)
def test_bad_input_gets_one_line(arguments: list[str], message: str) -> None:
    TOOL.assert_refused(*arguments, parts=(message,))


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_is_the_published_model_and_passes_all_checks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    hf_name, shape_name, num_gpus = EXAMPLES[name]
    monkeypatch.setenv("WORLD_SIZE", str(num_gpus))
    path = REPOSITORY / "examples" / f"{name}.args"
    config = parse_arguments([f"@{path}", "--rollouts", "r.jsonl", "--global-batch-size", "512", "--save", "s"])
    values = json.loads((REPOSITORY / "tests" / "helpers" / "hf_configs" / f"{hf_name}.json").read_text())
    published = ModelConfig(**model_settings(values))
    for setting in fields(ModelConfig):
        if setting.name not in OWN:
            assert getattr(config.model, setting.name) == getattr(published, setting.name), setting.name
    assert DecoderShape.of(config.model) == SHAPES[shape_name]
    assert config.model.bf16


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_fits_its_gpus(name: str) -> None:
    numbers = [*NUMBERS, "--sequences", "128", "--unique-tokens", "200000", "--longest-path", "16384"]
    values = planned(*numbers, "--args-file", f"examples/{name}.args", "--num-gpus", EXAMPLES[name][2])
    assert len(values["best"]) == 1
    assert values["best"][0]["memory_total_gib"] < 0.94 * 139
    assert f"@examples/{name}.args" in values["commands"][0]


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_is_submitted_with_its_nodes(name: str) -> None:
    script = f"bash examples/submit_large.sh {name} /models/x r.jsonl runs/x --dry-run -- --lr 1e-6".split()
    done = subprocess.run(script, capture_output=True, text=True, cwd=REPOSITORY)
    assert done.returncode == 0, done.stderr
    assert f"--nodes {EXAMPLES[name][2] // 8} " in done.stdout
    words = shlex.split(done.stdout)
    flags = words[words.index(next(word for word in words if word.startswith("@"))) :]
    settings = parse_settings([word for word in flags if word not in ("--load-hf", "/models/x")])
    assert settings.checkpoint.save == "runs/x"
    assert settings.optimization.lr == 1e-6


def test_argument_files_are_read_as_a_shell_would(tmp_path: Path) -> None:
    base = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 # a comment\n\n# another --lr 5\n"
    inner, outer = tmp_path / "inner.args", tmp_path / "outer.args"
    inner.write_text(base + "--save 'with space' --lr 1e-3\n")
    outer.write_text(f"@{inner}\n--lr 1e-4\n")
    config = parse_settings([f"@{outer}", "--train-iters", "7"])
    assert (config.model.num_layers, config.checkpoint.save, config.optimization.lr) == (2, "with space", 1e-4)
    assert config.optimization.train_iters == 7
    assert parse_settings([f"@{outer}", "--lr", "1e-5"]).optimization.lr == 1e-5
    inner.write_text("--save 'open\n")
    with pytest.raises(InputError, match="a line that cannot be read"):
        parse_settings([f"@{outer}"])
