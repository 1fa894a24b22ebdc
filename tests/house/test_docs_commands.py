"""Commands in README.md and docs/: every training command, and every recipe of an objective, is one that the parser and
its checks accept. What a page leaves open (``...``) is filled in; names of models become shipped configurations.
"""

import re
import shlex
from pathlib import Path

import pytest

from conftest import REPOSITORY
from megatron_dta.training.arguments import parse_arguments

PAGES = [REPOSITORY / "README.md", REPOSITORY / "slurm" / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))]
CONFIGS = REPOSITORY / "tests" / "helpers" / "hf_configs"
# What a command needs beside what a page is about.
SHAPE = "--num-layers 4 --hidden-size 64 --num-attention-heads 8 --max-position-embeddings 16384"
DATA = "--task arithmetic --rollout-batch-size 8 --n-samples-per-prompt 8 --rollout-max-response-len 8"
PROMPTS = "--prompt-data p.jsonl --tokenizer-type HuggingFaceTokenizer --tokenizer-model t.json --rollout-batch-size 8"
# Recipes of these take pairs or stored rollouts.
STORED = "--rollouts x.jsonl --global-batch-size 8"


def train_commands() -> list[tuple[str, str, int]]:
    """(page, arguments, processes) of every training command in a block of shell code."""
    commands = []
    for page in PAGES:
        for block in re.findall(r"```bash\n(.*?)```", page.read_text(), re.DOTALL):
            for line in block.replace("\\\n", " ").splitlines():
                command = re.search(r"(?:megatron_dta\.train|megatron-dta train)\b(.*)", line)
                if command and not line.lstrip().startswith("#"):
                    processes = re.search(r"--nproc-per-node (\d+)", line)
                    commands.append((page.name, command[1], int(processes[1]) if processes else 1))
    return commands


def recipes() -> list[tuple[str, str]]:
    """(name, flags) of the table of objectives."""
    text = (REPOSITORY / "docs" / "objectives.md").read_text()
    return re.findall(r"^\| ([^|]+?) \| `(--[^|]*?)`", text, re.MULTILINE)


def with_a_shipped_model(arguments: list[str], folder: Path) -> list[str]:
    """The arguments with a folder of a shipped config.json in the place of a model's name."""
    changed = list(arguments)
    for flag in ("--load-hf", "--hf-checkpoint"):
        if flag in changed:
            index = changed.index(flag) + 1
            name = changed[index].rsplit("/", 1)[-1].lower()
            known = sorted(CONFIGS.glob("*.json"))
            config = next((path for path in known if path.stem == name), CONFIGS / "qwen3-1.7b.json")
            (folder / "config.json").write_text(config.read_text())
            changed[index] = str(folder)
    return changed


@pytest.mark.parametrize(("page", "command", "processes"), train_commands(), ids=lambda value: str(value)[:40])
def test_training_commands_are_accepted(
    page: str, command: str, processes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", str(processes))
    arguments = with_a_shipped_model(shlex.split(command, comments=True), tmp_path)
    if "..." in arguments:
        arguments.remove("...")
        has_shape = "--load-hf" in arguments or "--hf-checkpoint" in arguments
        data = PROMPTS + " --reward-function exact_match"
        if "--n-samples-per-prompt" not in arguments:
            data += " --n-samples-per-prompt 8"
        filled = f"{data} --train-iters 4" + ("" if "--lr" in arguments else " --lr 1e-6")
        arguments = [*shlex.split(filled if has_shape else f"{SHAPE} --vocab-size 64 {filled}"), *arguments]
    config = parse_arguments(arguments)
    assert config.optimization.train_iters >= 4


def test_there_are_commands_and_recipes() -> None:
    assert len(train_commands()) >= 8
    assert {"PPO", "DAPO", "SFT", "DPO"} <= {name for name, _ in recipes()}


@pytest.mark.parametrize(("name", "flags"), recipes(), ids=lambda value: str(value)[:40])
def test_recipes_of_objectives_are_accepted(name: str, flags: str) -> None:
    for left_open, choice in (
        ("buffer-len N", "buffer-len 4"),
        ("estimator ...", "estimator rloo"),
        ("FILE", "x.jsonl"),
    ):
        flags = flags.replace(left_open, choice)
    stored = "--objective sft" in flags or "--dpo" in flags or "--objective dpo" in flags
    parse_arguments(shlex.split(f"{SHAPE} --vocab-size 64 {STORED if stored else DATA} --train-iters 4 {flags}"))


def test_the_package_names_commands_that_a_wheel_has() -> None:
    """Messages and help say ``megatron-dta NAME``: the scripts in tools/ exist in a checkout only."""
    scripts = [path.name for path in (REPOSITORY / "tools").glob("*.py")]
    sources = [path for path in (REPOSITORY / "megatron_dta").rglob("*.py")]
    assert [path.name for path in sources if any(f"tools/{name}" in path.read_text() for name in scripts)] == []
