"""Weights for rollout servers: whole tensors equal the checkpoint, and shards and deltas put together equal them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from verl.workers.engine.spec import translate_flat_indices

from worker import run_ranks, run_weights

MESHES = {
    "one-rank": {},
    "tensor": {"tensor_model_parallel_size": 2},
    "pipeline": {"pipeline_model_parallel_size": 2},
    "replicas": {},
    "context": {"context_parallel_size": 2},
}


@pytest.fixture(scope="module")
def results(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The exports of each mesh."""
    cases = {
        name: {"kind": "weights", "model": str(model_folder), "dtype": "float32", "engine": engine}
        for name, engine in MESHES.items()
    }
    on_two = [name for name in cases if name != "one-rank"]
    outcomes = run_ranks([cases[name] for name in on_two], 2, tmp_path_factory.mktemp("weights"))
    return dict(zip(on_two, outcomes, strict=True)) | {"one-rank": run_weights(cases["one-rank"])}


@pytest.mark.parametrize("name", MESHES)
def test_exports_equal_the_checkpoint(name: str, model_folder: Path, results: dict[str, Any]):
    saved, exported = load_file(model_folder / "model.safetensors"), results[name]
    assert set(exported["whole"]) == set(saved)
    for tensor, values in saved.items():
        assert torch.equal(exported["whole"][tensor], values), tensor

    names = [entry[0] for entry in exported["shards"][0]]
    assert set(names) == set(saved)
    rebuilt = {tensor: torch.full_like(values, torch.nan) for tensor, values in saved.items()}
    for shards in exported["shards"]:
        # verl's ranks gather tensor by tensor, so every rank must yield the same names in the same order.
        assert [entry[0] for entry in shards] == names
        for tensor, values, shape, contributes, block in shards:
            assert tuple(shape) == tuple(saved[tensor].shape)
            assert contributes or not len(values)
            if contributes:
                index = translate_flat_indices(torch.arange(len(values)), block)
                assert rebuilt[tensor].view(-1)[index].isnan().all(), "two ranks send the same elements"
                rebuilt[tensor].view(-1)[index] = values
    for tensor, values in saved.items():
        assert torch.equal(rebuilt[tensor], values), tensor


@pytest.mark.parametrize("name", MESHES)
def test_deltas_are_what_changed(name: str, results: dict[str, Any]):
    exported = results[name]
    updated = {tensor: values.clone() for tensor, values in exported["whole"].items()}
    sent = 0
    for deltas in exported["deltas"]:
        for slots, _, counts, index, values in deltas:
            ((tensor, shape),) = slots
            assert tuple(shape) == tuple(updated[tensor].shape)
            assert int(counts[0]) == len(index) == len(values)
            updated[tensor].view(-1)[index.long()] = values
            sent += len(index)
    changed = sum(int((exported["whole"][t] != exported["changed"][t]).sum()) for t in updated)
    assert sent == changed > 0
    for tensor, values in exported["changed"].items():
        assert torch.equal(updated[tensor], values), tensor
