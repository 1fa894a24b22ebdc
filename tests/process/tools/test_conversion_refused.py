"""Invalid input of the conversion: one line names it and nothing is written; also on full disks."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from checkpoint_worker import small_files_only
from conversion_cases import save_huggingface, to_huggingface, to_megatron
from megatron_dta.core.common.errors import InputError
from megatron_dta.training.checkpoint.integrity import CHECKSUMS
from strict_pickle_cases import ATTACKS, Bomb
from tool_runs import run_tool

INDEX = "model.safetensors.index.json"
SECOND = "model-00002-of-*.safetensors"


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("original")
    save_huggingface(folder / "hf", "qwen2", 60)
    to_megatron(folder / "hf", folder / "megatron")
    return folder


@pytest.fixture
def source(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original / "hf", tmp_path / "hf"))


def edit_index(source: Path, change: Callable[[dict], None]) -> None:
    content = json.loads((source / INDEX).read_text())
    change(content["weight_map"])
    (source / INDEX).write_text(json.dumps(content))


def edit_config(source: Path, **values: object) -> None:
    path = source / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def cut(source: Path, count: int) -> None:
    path = next(source.glob(SECOND))
    path.write_bytes(path.read_bytes()[:-count])


def only_pickles(source: Path) -> None:
    for path in [*source.glob("*.safetensors"), source / INDEX]:
        path.unlink()
    torch.save({}, source / "pytorch_model.bin")


BAD_SOURCES: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing shard": (lambda source: next(source.glob(SECOND)).unlink(), r"model-00002-of-\d+.safetensors: missing"),
    "truncated": (lambda source: cut(source, 5), r"model-00002-of-\d+.safetensors: truncated or not a safe"),
    "index names a missing tensor": (
        lambda source: edit_index(source, lambda names: names.update({"model.x": names["model.norm.weight"]})),
        r"has no tensor model.x, which model.safetensors.index.json places there",
    ),
    "index leaves out a tensor": (
        lambda source: edit_index(source, lambda names: names.pop("model.norm.weight")),
        r"has model.norm.weight, unknown to model.safetensors.index.json",
    ),
    "index leads away": (
        lambda source: edit_index(source, lambda names: names.update({"model.norm.weight": "../x.safetensors"})),
        r"names the file '../x.safetensors'; only safetensors files beside it",
    ),
    "config wants more layers": (
        lambda source: edit_config(source, num_hidden_layers=5),
        r"model.layers.2.input_layernorm.weight, .* and \d+ more tensors are missing",
    ),
    "wrong shape": (
        lambda source: edit_config(source, intermediate_size=44),
        r"mlp.\w+_proj.weight has the shape \[40, 24\]; config.json says \[44, 24\]",
    ),
    "pickles": (only_pickles, r"pytorch_model.bin is a pickle, which can run code and is not read"),
}


@pytest.mark.parametrize("case", BAD_SOURCES)
def test_bad_source(source: Path, tmp_path: Path, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    spoil, message = BAD_SOURCES[case]
    spoil(source)
    with pytest.raises(InputError, match=message) as caught:
        run_tool(monkeypatch, "convert_hf_to_megatron", f"--hf-checkpoint {source} --save {tmp_path}/out")
    assert "\n" not in str(caught.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf"]


def test_existing_output(original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "precious").write_text("")
    hf = original / "hf"
    for tool, arguments in (
        ("convert_hf_to_megatron", f"--hf-checkpoint {hf} --save {tmp_path}/out"),
        (
            "convert_megatron_to_hf",
            f"--load {original}/megatron --hf-checkpoint {original}/hf --save-hf {tmp_path}/out",
        ),
    ):
        with pytest.raises(InputError, match="out: exists already; give a folder that does not, or delete it first"):
            run_tool(monkeypatch, tool, arguments)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["precious"]


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-400])


BAD_CHECKPOINTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "truncated": (lambda path: truncate(max(path.glob("*.distcp"))), r"distcp: has \d+ bytes of \d+"),
    "missing file": (lambda path: next(path.glob("*.distcp")).unlink(), r"distcp: is missing from the checkpoint"),
    "damaged metadata": (lambda path: truncate(path / ".metadata"), "the checkpoint's metadata cannot be read"),
    "code in the metadata": (
        lambda path: (path / ".metadata").write_bytes(ATTACKS["dotted"]),
        "filesystem.os.system does not belong into a checkpoint's metadata",
    ),
    "code in the common state": (
        lambda path: torch.save({"megatron_dta": Bomb()}, path / "common.pt"),
        "the checkpoint cannot be read .*[Ww]eights.only",
    ),
    "damaged bytes": (lambda path: spoil_bytes(max(path.glob("*.distcp"), key=size)), "the checkpoint cannot be read"),
}


def size(path: Path) -> int:
    return path.stat().st_size


def spoil_bytes(path: Path) -> None:
    """Found only when a piece is read."""
    path.write_bytes(bytes(64) + path.read_bytes()[64:])


@pytest.mark.parametrize("case", BAD_CHECKPOINTS)
def test_bad_checkpoint(original: Path, tmp_path: Path, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(original / "megatron", tmp_path / "megatron")
    spoil, message = BAD_CHECKPOINTS[case]
    spoil(tmp_path / "megatron" / "release")
    # As somebody would who means harm: what is there is what the list of checksums says.
    (tmp_path / "megatron" / "release" / CHECKSUMS).unlink()
    flags = f"--load {tmp_path}/megatron --hf-checkpoint {original}/hf --save-hf {tmp_path}/out"
    with pytest.raises(InputError, match=message) as caught:
        run_tool(monkeypatch, "convert_megatron_to_hf", flags)
    assert "\n" not in str(caught.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["megatron"]


def test_a_full_disk_leaves_nothing_and_leftovers_do_not_matter(original: Path, tmp_path: Path) -> None:
    checkpoint = original / "megatron" / "release"
    with small_files_only(True):
        with pytest.raises(InputError, match=r"out: cannot be written \((File too large|a file could not be)"):
            to_megatron(original / "hf", tmp_path / "out")
        with pytest.raises(InputError, match=r"--save-hf .*out: cannot be written \(File too large\)"):
            to_huggingface(checkpoint, original / "hf", tmp_path / "out")
    assert not list(tmp_path.iterdir())
    # Of a conversion that was killed.
    (tmp_path / "out.unfinished").mkdir()
    (tmp_path / "out.unfinished" / "old").touch()
    to_huggingface(checkpoint, original / "hf", tmp_path / "out")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == sorted(
        path.name for path in (original / "hf").iterdir()
    )
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
