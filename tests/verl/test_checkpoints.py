"""Checkpoints of the engine: a loaded run continues exactly as the saved one."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from verl.utils import tensordict_utils

from megatron_dta.core.common.errors import InputError
from worker import batch_of, build_worker


def _case(model_folder: Path, **changes: Any) -> dict[str, Any]:
    case = {"model": str(model_folder), "dtype": "float32", "form": "nested", "seed": 3, "rows": 4}
    return case | {"optim": {"lr": 0.01, "lr_decay_style": "linear"}, "engine": {}} | changes


def _train(worker: Any, case: dict[str, Any]) -> Any:
    common = {"global_batch_size": 4, "mini_batch_size": 4, "calculate_entropy": False}
    output = worker.train_mini_batch(batch_of(case, 0, 1, **common))
    return tensordict_utils.get(output, "metrics")


def _weights(worker: Any) -> dict[str, torch.Tensor]:
    return {name: values.clone() for name, values in worker.engine.get_per_tensor_param()[0]}


LORA = {"lora_rank": 2, "lora_alpha": 4, "lora": {"merge": True}}


@pytest.mark.parametrize(
    "changes",
    [{}, {"engine": {"use_distributed_optimizer": True}}, {"model_settings": LORA}, {"value_head": True}],
    ids=["plain", "distributed-optimizer", "lora", "critic"],
)
def test_a_loaded_run_goes_on_as_the_saved_one(changes: dict[str, Any], model_folder: Path, tmp_path: Path):
    case = _case(model_folder, **changes)
    first = build_worker(case)
    begin = None if "value_head" in changes else _weights(first)
    _train(first, case)
    first.save_checkpoint(str(tmp_path / "global_step_1"), global_step=1)
    second = build_worker(case)
    second.load_checkpoint(str(tmp_path / "global_step_1"))
    resumed, two = _train(first, case), _train(second, case)
    for name in ("loss", "grad_norm", "lr"):
        assert resumed[name] == two[name], name
    if begin is not None:
        after, again = _weights(first), _weights(second)
        assert all(torch.equal(after[name], again[name]) for name in after)
        assert any(not torch.equal(after[name], begin[name]) for name in after)


def test_contents_and_number_of_checkpoints(model_folder: Path, tmp_path: Path):
    contents = {"save_contents": ["model", "hf_model"], "load_contents": ["model"]}
    worker = build_worker(case := _case(model_folder, checkpoint=contents))
    _train(worker, case)
    for step in (1, 2, 3):
        worker.save_checkpoint(str(tmp_path / f"global_step_{step}"), global_step=step, max_ckpt_to_keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["global_step_2", "global_step_3"]
    folder = tmp_path / "global_step_3"
    exported = transformers.AutoModelForCausalLM.from_pretrained(folder / "huggingface", dtype=torch.float32)
    parameters = dict(exported.named_parameters())
    weights = _weights(worker)
    assert all(torch.equal(parameters[name], values) for name, values in weights.items())
    other = build_worker(case)
    other.load_checkpoint(str(folder))
    assert all(torch.equal(values, weights[name]) for name, values in _weights(other).items())


def test_bad_checkpoints_are_refused_in_one_line(model_folder: Path, tmp_path: Path):
    worker = build_worker(_case(model_folder))
    with pytest.raises(InputError, match="holds no checkpoint"):
        worker.load_checkpoint(str(tmp_path / "none"))
    with pytest.raises(InputError, match="hdfs_path"):
        worker.save_checkpoint(str(tmp_path / "x"), hdfs_path="hdfs://somewhere")
    for settings, message in (
        ({"async_save": True}, r"checkpoint.async_save=True"),
        ({"save_contents": ["model", "everything"]}, "everything"),
    ):
        with pytest.raises(InputError, match=message):
            build_worker(_case(model_folder, checkpoint=settings))
