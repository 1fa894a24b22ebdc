"""verl's own trainer for supervised training with ``engine=megatron_dta``, in processes like those of torchrun."""

import re
from pathlib import Path

import pandas
import pytest
import verl.trainer.sft_trainer  # noqa: F401 (here once, not in each rank)

from forked import run_ranks

_STEP = re.compile(r"step:(\d+) - .*train/loss:([-\d.e]+) - train/grad_norm:([-\d.e]+)")


def _train(model_folder: Path, data: Path, num_ranks: int, *flags: str) -> dict[int, tuple[float, float]]:
    """Loss and gradient norm of every step."""
    command = ["-m", "verl.trainer.sft_trainer", "engine=megatron_dta", "engine.dtype=float32"]
    command += [f"data.train_files={data}", "data.train_batch_size=8", "data.num_workers=0", "data.max_length=128"]
    command += ["data.ignore_input_ids_mismatch=True", "data.micro_batch_size_per_gpu=4", f"model.path={model_folder}"]
    command += ["+model.override_config.attn_implementation=sdpa", "optim.lr=1e-3", "trainer.logger=[console]"]
    command += ["trainer.device=cpu", "trainer.project_name=x", "trainer.experiment_name=y", *flags]
    # Hydra writes its files into the working directory.
    ranks = run_ranks(command, num_ranks, cwd=data.parent)
    for done in ranks:
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    printed = "".join(done.stdout + done.stderr for done in ranks)
    return {int(step): (float(loss), float(norm)) for step, loss, norm in _STEP.findall(printed)}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Questions that share their beginning, as chat messages."""
    rows = [
        [
            {"role": "user", "content": f"what is {i % 7} + {i % 5}"},
            {"role": "assistant", "content": str(i % 7 + i % 5)},
        ]
        for i in range(64)
    ]
    path = tmp_path_factory.mktemp("data") / "train.parquet"
    pandas.DataFrame({"messages": rows}).to_parquet(path)
    return path


def test_sft_trainer_on_two_replicas_resumes_exactly(model_folder: Path, data: Path, tmp_path: Path):
    folder = f"trainer.default_local_dir={tmp_path}"
    uninterrupted = _train(model_folder, data, 2, folder, "trainer.total_training_steps=4", "trainer.save_freq=2")
    assert sorted(uninterrupted) == [1, 2, 3, 4]
    assert uninterrupted[4][0] < uninterrupted[1][0]
    resumed = _train(
        model_folder,
        data,
        2,
        folder,
        "trainer.total_training_steps=4",
        "trainer.resume_mode=resume_path",
        f"trainer.resume_from_path={tmp_path}/global_step_2",
    )
    assert resumed == {step: uninterrupted[step] for step in (3, 4)}
