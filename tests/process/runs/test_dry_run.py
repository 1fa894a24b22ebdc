"""``--dry-run`` describes the run, writes nothing, and reports the same errors as training."""

import io
import os
import re
from pathlib import Path

import numpy as np
import pytest

from conftest import REPOSITORY, seed_all
from conversion_cases import save_huggingface
from forked import run_python
from megatron_dta.common.console import Console
from megatron_dta.core.common.errors import InputError
from megatron_dta.core.rollouts.load import write_rollouts
from megatron_dta.training.arguments import parse_arguments
from megatron_dta.wiring.dry_run import dry_run
from megatron_dta.wiring.setup import build_trainer
from rollout_servers import VllmServer
from trainer_cases import MODEL, make_rollouts, make_trainer, run

SAMPLED = (
    "--task arithmetic --arithmetic-max-operand 3 --rollout-batch-size 4 --n-samples-per-prompt 3 "
    "--rollout-max-response-len 4"
)


def check(arguments: str, model: str = MODEL) -> list[str]:
    lines: list[str] = []
    dry_run(parse_arguments(f"{model} {arguments} --dry-run".split()), lines.append)
    assert lines[-1] == "dry run: nothing is wrong; nothing was trained or written"
    return lines


def line_of(lines: list[str], name: str) -> str:
    return next(line for line in lines if line.split()[0] == name)


def files_below(folder: Path) -> dict[Path, tuple[int, int]]:
    return {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in folder.rglob("*")}


def stored(folder: Path) -> str:
    write_rollouts(folder / "r.jsonl", make_rollouts(seed_all(1), 6, 4))
    return f"--rollouts {folder}/r.jsonl --global-batch-size 8 --train-iters 3"


def test_stored_rollouts(tmp_path: Path) -> None:
    flags = stored(tmp_path)
    before = files_below(tmp_path)
    lines = check(f"{flags} --save {tmp_path}/run/deep --tensorboard-dir {tmp_path}/events --timeline-dir {tmp_path}/t")
    assert files_below(tmp_path) == before
    assert "24 of " in line_of(lines, "rollouts")
    assert line_of(lines, "epochs").split(maxsplit=1)[1] == "1.00; the first has 3 steps"
    trainer, _ = make_trainer(flags)
    batch = trainer.source.next_batch(0)
    count = sum(parameter.numel() for parameter in trainer.model.parameters())
    assert f" {count:,} parameters" in line_of(lines, "model")
    trainer._next_step(trainer._stopwatch(1))
    reuse = float(re.search(r"reuse ([\d.]+)", " ".join(lines))[1])
    lengths = [int(np.flatnonzero(rollout.loss_mask)[-1]) + 1 for rollout in batch]
    assert f"8 rollouts, {sum(lengths):,} tokens" in " ".join(lines)
    assert reuse > 1
    assert "from random weights, seed 1234" in line_of(lines, "start")


def test_a_started_run(tmp_path: Path) -> None:
    flags = f"{stored(tmp_path)} --save {tmp_path}/run"
    run(flags)
    before = files_below(tmp_path)
    lines = check(f"{flags.replace('--train-iters 3', '--train-iters 5')} --clip-grad 2")
    assert files_below(tmp_path) == before
    text = "\n".join(lines)
    assert f"continues {tmp_path}/run/iter_0000003 after step 3\n" in text
    assert "--clip-grad: 1.0 before, 2.0 now" in text
    assert "--dry-run" not in text
    assert "nothing is left to train" in "\n".join(check(flags))
    with pytest.raises(InputError, match="checkpoint of another model: --num-layers is 1 there and 3 here"):
        check(flags, MODEL.replace("--num-layers 1", "--num-layers 3"))
    (tmp_path / "run" / "iter_0000003" / ".metadata").write_bytes(b"\x80nonsense")
    with pytest.raises(InputError, match="cannot be read"):
        check(flags)


def test_sampled_rollouts_and_meshes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = check(f"{SAMPLED} --objective ppo --kl-loss-coef 0.1 --save {tmp_path}/run")
    assert "of 4 to 4 tokens" in line_of(lines, "prompts")
    assert "further models" in line_of(lines, "memory")
    monkeypatch.setenv("WORLD_SIZE", "12")
    ranks = "--pipeline-model-parallel-size 2 --tensor-model-parallel-size 3"
    lines = check(f"{SAMPLED} --num-layers 2 --ffn-hidden-size 66 {ranks}")
    assert line_of(lines, "mesh").endswith("12 processes: tensor 3, pipeline 2, data 2; layers of stages [1, 1]")
    with pytest.raises(InputError, match="--tensor-model-parallel-size 2 does not divide"):
        check(f"{SAMPLED} --tensor-model-parallel-size 2")


@pytest.mark.parametrize(
    ("row", "more"),
    [
        ("as in the file", ""),
        (
            "on the host",
            "--main-params-dtype fp32 --exp-avg-dtype fp32 --exp-avg-sq-dtype fp32 --optimizer-cpu-offload",
        ),
    ],
)
def test_70b_on_one_node_fits_as_its_page_says(row: str, more: str, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (REPOSITORY / "docs" / "one_node_70b.md").read_text()
    command = re.search(r"megatron_dta.train (@examples/llama3_70b_one_node.*?)```", page, re.DOTALL)[1]
    # Without the files that a run has of its own.
    paths = r"--(load-hf|tokenizer-type|tokenizer-model|prompt-data|reward-function|save) \S+"
    flags = re.sub(paths, "", command.replace("\\\n", " ")).replace("--async-save", "")
    flags = re.sub(r"--save-interval \d+", "--task arithmetic", flags)
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.chdir(REPOSITORY)
    lines = check(f"{flags} {more}", model="")
    figures = dict(re.findall(r"([a-z]+) ([\d.]+)(?:,|$)", line_of(lines, "memory").split(":")[1]))
    figures["together"] = re.search(r"about ([\d.]+) GiB", line_of(lines, "memory"))[1]
    host = lines[lines.index(line_of(lines, "memory")) + 1]
    figures["host"] = host.split()[0] if "host" in host else "0"
    names = ("weights", "gradients", "optimizer", "values", "activations", "together", "host")
    expected = [float(cell) for cell in re.search(rf"^\| {row} \|(.*)\|$", page, re.MULTILINE)[1].split("|")]
    assert [float(figures.get(name, 0)) for name in names] == pytest.approx(expected, abs=0.05)
    assert expected[-2] < 0.94 * 140


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("--rollouts nothing.jsonl", "nothing.jsonl: "),
        ("--tree-memory-tokens 3 --tree-segment-tokens 3", "--tree-memory-tokens 3: a rollout has"),
        ("--eval-rollouts {0}/bad.jsonl --eval-interval 1", "bad.jsonl: row 1: "),
    ],
)
def test_what_is_wrong_is_told(tmp_path: Path, change: str, message: str) -> None:
    (tmp_path / "bad.jsonl").write_text('{"token_ids": [1]}\n')
    with pytest.raises(InputError, match=message) as caught:
        check(f"{stored(tmp_path)} {change.format(tmp_path)}")
    assert "\n" not in str(caught.value)


def test_the_command(tmp_path: Path) -> None:
    """Status 0 and a summary; under a launcher only the first process speaks."""
    command = ["-m", "megatron_dta.train", *MODEL.split(), *SAMPLED.split(), "--dry-run"]
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": f"{REPOSITORY}:{os.environ.get('PYTHONPATH', '')}",
    }
    good = run_python(command, env=environment, cwd=tmp_path)
    assert good.returncode == 0, good.stderr
    assert good.stdout.count("\n") >= 7
    second = environment | {"RANK": "1", "WORLD_SIZE": "2"}
    assert run_python(command, env=second, cwd=tmp_path).stdout == ""
    assert list(tmp_path.iterdir()) == []


def test_servers_are_checked_before_weights_are_loaded(tmp_path: Path) -> None:
    save_huggingface(tmp_path / "hf", "qwen3", 3)
    (tmp_path / "p.jsonl").write_text('{"prompt_token_ids": [5, 6], "answer": "8"}\n' * 2)
    (tmp_path / "reward.py").write_text("def reward(row, text, token_ids):\n    return 1.0\n")
    flags = (
        f"--load-hf {tmp_path}/hf --tokenizer-type NullTokenizer --eos-id 3 --prompt-data {tmp_path}/p.jsonl --lr 1e-4 "
        f"--reward-function {tmp_path}/reward.py:reward --rollout-batch-size 2 --train-iters 1 --save {tmp_path}/run "
        "--rollout-max-response-len 8 "
        "--rollout-engine vllm --rollout-server-url "
    )
    with VllmServer(np.zeros((4, 4))) as server:
        lines = check(f"{flags}{server.url} --rollout-server-url http://127.0.0.1:9", "")
    assert line_of(lines, "servers").split(maxsplit=1)[1] == "1 of 2 answer"
    assert "http://127.0.0.1:9 does not: GET /health: " in lines[lines.index(line_of(lines, "servers")) + 1]
    told = "--rollout-server-url 127.0.0.1:8000: must be like http://HOST:PORT"
    with pytest.raises(InputError, match=told):
        check(f"{flags}127.0.0.1:8000", "")
    output = io.StringIO()
    with pytest.raises(InputError, match=told):
        build_trainer(parse_arguments(f"{flags}127.0.0.1:8000".split()), Console(file=output))
    assert "weights" not in output.getvalue()
