"""Invalid input of the conversion: one line names it and nothing is written; also kills and full disks."""

from __future__ import annotations

import filecmp
import json
import os
import pickle
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoint_worker import small_files_only
from conftest import REPOSITORY
from conversion_cases import save_huggingface, to_huggingface, to_megatron
from forked import Program, run_python
from megatron_dta.core.common.errors import InputError
from megatron_dta.training.checkpoint.integrity import CHECKSUMS
from megatron_dta.training.huggingface import job as job_module
from megatron_dta.training.huggingface import read_part as to_megatron_module
from strict_pickle_cases import ATTACKS, Bomb
from tool_runs import run_tool

INDEX = "model.safetensors.index.json"
SECOND = "model-00002-of-*.safetensors"


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("original")
    save_huggingface(folder / "hf", "qwen2", 60)
    to_megatron(folder / "hf", folder / "megatron", tensor_size=2)
    return folder


@pytest.fixture
def source(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original / "hf", tmp_path / "hf"))


def edit_index(source: Path, change: Callable[[dict], None]) -> None:
    content = json.loads((source / INDEX).read_text())
    change(content["weight_map"])
    (source / INDEX).write_text(json.dumps(content))


def edit_file(source: Path, change: Callable[[dict], None]) -> None:
    path = next(source.glob(SECOND))
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def edit_config(source: Path, **values: object) -> None:
    path = source / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def edit_header(source: Path, old: bytes, new: bytes) -> None:
    path = next(source.glob(SECOND))
    content = path.read_bytes()
    assert len(old) == len(new)
    assert old in content
    path.write_bytes(content.replace(old, new, 1))


def cut(source: Path, count: int) -> None:
    path = next(source.glob(SECOND))
    path.write_bytes(path.read_bytes()[:-count])


def only_pickles(source: Path) -> None:
    for path in [*source.glob("*.safetensors"), source / INDEX]:
        path.unlink()
    torch.save({}, source / "pytorch_model.bin")


def no_weights(source: Path) -> None:
    for path in [*source.glob("*.safetensors"), source / INDEX]:
        path.unlink()


LAYER = "model.layers.0"
BAD_SOURCES: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing shard": (lambda source: next(source.glob(SECOND)).unlink(), r"model-00002-of-\d+.safetensors: missing"),
    "truncated": (lambda source: cut(source, 5), r"model-00002-of-\d+.safetensors: truncated: \d+ bytes, \d+ by its"),
    "almost empty": (lambda source: next(source.glob(SECOND)).write_bytes(b"\x10"), "truncated or not a safetensors"),
    "no header": (lambda source: next(source.glob(SECOND)).write_bytes(bytes(1000)), "truncated or not a safetensors"),
    "damaged header": (lambda source: edit_header(source, b'"dtype"', b'"dtyp"x'), "its header is damaged"),
    "longer": (lambda source: next(source.glob(SECOND)).open("ab").write(b"xy"), "longer than its header says"),
    "index is no json": (lambda source: (source / INDEX).write_text("{"), "has no readable weight_map"),
    "index names a missing tensor": (
        lambda source: edit_index(source, lambda names: names.update({"model.x": names["model.norm.weight"]})),
        r"has no tensor model.x, which model.safetensors.index.json places there",
    ),
    "index leaves out a tensor": (
        lambda source: edit_index(source, lambda names: names.pop("model.norm.weight")),
        r"model.norm.weight is in it, but model.safetensors.index.json does not say so",
    ),
    "index leads away": (
        lambda source: edit_index(source, lambda names: names.update({"model.norm.weight": "../x.safetensors"})),
        r"names the file '../x.safetensors'; only safetensors files beside it",
    ),
    "surplus tensor": (
        lambda source: (
            edit_file(source, lambda tensors: tensors.update({"model.extra": torch.ones(2)})),
            edit_index(source, lambda names: names.update({"model.extra": next(source.glob(SECOND)).name})),
        ),
        r"model.extra is not known to the architecture",
    ),
    "config wants more layers": (
        lambda source: edit_config(source, num_hidden_layers=5),
        r"model.layers.4.input_layernorm.weight, .* and \d+ more tensors are missing",
    ),
    "config wants fewer layers": (
        lambda source: edit_config(source, num_hidden_layers=3),
        "more tensors are not known",
    ),
    "wrong shape": (
        lambda source: edit_config(source, intermediate_size=44),
        r"mlp.\w+_proj.weight has the shape \[40, 24\]; config.json says \[44, 24\]",
    ),
    "vocabulary": (
        lambda source: edit_config(source, vocab_size=38),
        r"embed_tokens.weight has the shape \[37, 24\]; config.json says \[38, 24\]",
    ),
    "integers": (
        lambda source: edit_file(source, lambda tensors: tensors.update({n: t.int() for n, t in tensors.items()})),
        r"is of type I32; weights must be one of F64, F32, F16, BF16",
    ),
    "two dtypes": (
        lambda source: edit_file(source, lambda tensors: tensors.update({n: t.half() for n, t in tensors.items()})),
        r"is of type torch.float\d+ and .* of type torch.float\d+; give --params-dtype",
    ),
    "pickles": (only_pickles, r"pytorch_model.bin is a pickle, which can run code and is not read"),
    "nothing": (no_weights, r"has neither model.safetensors nor model.safetensors.index.json"),
    "architecture": (
        lambda source: edit_config(source, architectures=["GemmaForCausalLM"]),
        "the architecture GemmaForCausalLM is not supported",
    ),
    "no config": (lambda source: (source / "config.json").unlink(), "config.json: no such file"),
}


@pytest.mark.parametrize("case", BAD_SOURCES)
def test_bad_source(source: Path, tmp_path: Path, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    spoil, message = BAD_SOURCES[case]
    spoil(source)
    with pytest.raises(InputError, match=message) as caught:
        run_tool(monkeypatch, "convert_hf_to_megatron", f"--hf-checkpoint {source} --save {tmp_path}/out")
    assert "\n" not in str(caught.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--tensor-model-parallel-size 3", "--tensor-model-parallel-size 3 does not divide the model's --num-query"),
        ("--pipeline-model-parallel-size 5", "--pipeline-model-parallel-size 5 is more than the model's 4 layers"),
        ("--expert-model-parallel-size 2", "--expert-model-parallel-size 2: the model has no experts"),
        ("--processes 0", "--processes is 0; it must be at least 1"),
    ],
)
def test_bad_flags(source: Path, tmp_path: Path, flags: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match=message):
        run_tool(monkeypatch, "convert_hf_to_megatron", f"--hf-checkpoint {source} --save {tmp_path}/out {flags}")
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
    "truncated": (lambda path: truncate(next(path.glob("*.distcp"))), r"distcp: is missing or truncated"),
    "missing file": (lambda path: next(path.glob("*.distcp")).unlink(), r"distcp: is missing or truncated"),
    "damaged metadata": (lambda path: truncate(path / ".metadata"), "is not a readable distributed checkpoint"),
    "no metadata": (lambda path: (path / ".metadata").unlink(), "is not a readable distributed checkpoint"),
    "pickle": (
        lambda path: (path / ".metadata").write_bytes(pickle.dumps(Bomb())),
        "system does not belong into a checkpoint's metadata",
    ),
    "dotted name": (
        lambda path: (path / ".metadata").write_bytes(ATTACKS["dotted"]),
        "filesystem.os.system does not belong into a checkpoint's metadata",
    ),
    "other metadata": (
        lambda path: (path / ".metadata").write_bytes(pickle.dumps({"a": 1})),
        "holds a dict instead of metadata",
    ),
    "common pickle": (
        lambda path: (path / "common.pt").write_bytes(pickle.dumps(Bomb())),
        "was not written by torch.save",
    ),
    "common code": (
        lambda path: torch.save({"megatron_dta": Bomb()}, path / "common.pt"),
        "holds objects that could run code",
    ),
    "settings": (
        lambda path: torch.save({"megatron_dta": {"settings": "[" * 100_000}}, path / "common.pt"),
        "its settings cannot be read",
    ),
}


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


def test_damaged_bytes_in_the_middle_leave_nothing(original: Path, tmp_path: Path) -> None:
    """Found only when the piece is read."""
    shutil.copytree(original / "megatron", tmp_path / "megatron")
    path = next((tmp_path / "megatron" / "release").glob("*.distcp"))
    content = bytearray(path.read_bytes())
    content[:64] = bytes(64)
    path.write_bytes(content)
    with pytest.raises(InputError, match=r"distcp: is damaged or truncated"):
        to_huggingface(tmp_path / "megatron" / "release", original / "hf", tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["megatron"]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (dict(num_attention_heads=2, num_key_value_heads=1, head_dim=12), r"--num-attention-heads is 4 there and 2 by"),
        (dict(rms_norm_eps=1e-3), r"--norm-epsilon is 1e-06 there and 0.001 by"),
        (dict(vocab_size=30), r"--vocab-size is 37 there and 30 by"),
        (dict(tie_word_embeddings=True), r"--untie-embeddings-and-output-weights is True there and False by"),
    ],
)
def test_a_checkpoint_of_another_model(
    source: Path, tmp_path: Path, values: dict, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_tool(monkeypatch, "convert_hf_to_megatron", f"--hf-checkpoint {source} --save {tmp_path}/megatron")
    edit_config(source, **values)
    with pytest.raises(InputError, match=message):
        run_tool(
            monkeypatch,
            "convert_megatron_to_hf",
            f"--load {tmp_path}/megatron --hf-checkpoint {source} --save-hf {tmp_path}/out",
        )
    assert not (tmp_path / "out").exists()


def test_a_full_disk_leaves_nothing(original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        small_files_only(True),
        pytest.raises(InputError, match=r"cannot be written \(File too large\); nothing"),
    ):
        to_megatron(original / "hf", tmp_path / "out")
    with (
        small_files_only(True),
        pytest.raises(InputError, match=r"cannot be written \(File too large\); nothing"),
    ):
        to_huggingface(original / "megatron" / "release", original / "hf", tmp_path / "out")
    with monkeypatch.context() as full:  # not even the fingerprint fits

        def no_space(path: Path, text: str) -> None:
            path.touch()
            raise OSError(28, "No space left on device")

        full.setattr(job_module, "replace_text", no_space)
        with pytest.raises(InputError, match=r"cannot be written \(No space left on device\); nothing"):
            to_megatron(original / "hf", tmp_path / "out")
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr(job_module.shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    with pytest.raises(InputError, match=r"has 1,000 bytes free; the conversion needs \d"):
        to_megatron(original / "hf", tmp_path / "out")
    assert not list(tmp_path.iterdir())


KILLED = """
import os, signal, sys
sys.path[:0] = {paths!r}
from pathlib import Path
from conversion_cases import to_megatron
from megatron_dta.training.huggingface import read_part as module
module.FILE_BYTES, module.PIECE_BYTES = 8000, 1000
written = 0
append = module.PieceWriter.append
def counting(self, values):
    global written
    append(self, values)
    written += 1
    if written == {pieces}:
        self._file.flush()
        os.kill(os.getpid(), signal.SIGKILL)
module.PieceWriter.append = counting
to_megatron(Path({source!r}), Path({target!r}), tensor_size=2)
"""


def test_a_killed_conversion_continues(original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed in the middle of a file: complete files are kept, the others written, the result is the same."""
    paths = [
        str(REPOSITORY / "tests"),
        str(REPOSITORY / "tests" / "helpers"),
        str(REPOSITORY / "tests" / "cases"),
        str(REPOSITORY),
        str(REPOSITORY / "kernels"),
    ]
    script = KILLED.format(paths=paths, pieces=60, source=str(original / "hf"), target=str(tmp_path / "out"))
    (tmp_path / "killed.py").write_text(script)
    assert run_python([tmp_path / "killed.py"]).returncode == -signal.SIGKILL
    assert not (tmp_path / "out").exists()
    unfinished = tmp_path / "out.tmp" / "release"
    complete = {path.name.removesuffix(".done") for path in unfinished.glob("*.done")}
    assert 1 < len(complete) < len(list(unfinished.glob("*.distcp")))
    inodes = {name: (unfinished / name).stat().st_ino for name in complete}
    # As after a crash of the machine, which may lose what a file system still had in memory.
    os.truncate(unfinished / min(complete), 100)

    monkeypatch.setattr(to_megatron_module, "FILE_BYTES", 8000)
    monkeypatch.setattr(to_megatron_module, "PIECE_BYTES", 1000)
    with pytest.raises(InputError, match=r"holds an unfinished conversion of other input or to other"):
        to_megatron(original / "hf", tmp_path / "out", tensor_size=1)
    checkpoint = to_megatron(original / "hf", tmp_path / "out", tensor_size=2)
    assert {name: (checkpoint / name).stat().st_ino for name in complete} == inodes
    expected = to_megatron(original / "hf", tmp_path / "again", tensor_size=2)
    names = sorted(path.name for path in expected.glob("*.distcp"))
    assert sorted(path.name for path in checkpoint.iterdir()) == sorted(path.name for path in expected.iterdir())
    assert filecmp.cmpfiles(checkpoint, expected, names, shallow=False)[0] == names
    back = to_huggingface(checkpoint, original / "hf", tmp_path / "back")
    names = sorted(path.name for path in (original / "hf").iterdir())
    assert filecmp.cmpfiles(back, original / "hf", names, shallow=False)[0] == names


@pytest.mark.parametrize("seed", [0])
def test_kills_at_random_moments(original: Path, tmp_path: Path, seed: int) -> None:
    """Two processes write many files, are killed again and again, and end with the right ones."""
    rng = np.random.default_rng(seed)
    command = ["tools/convert_megatron_to_hf.py", "--processes", "2", "--save-hf", tmp_path / "out"]
    command += ["--load", original / "megatron", "--hf-checkpoint", original / "hf", "--max-shard-size", "3e-6"]
    for attempt in range(3):
        program = Program(command)
        if attempt < 2:
            # As many files are complete.
            wanted = attempt * 6 + int(rng.integers(0, 6))
            program.wait_until(lambda wanted=wanted: len(list((tmp_path / "out.tmp").glob("*.done"))) >= wanted)
            os.kill(program.pid, signal.SIGKILL)
        done = program.wait()
        if attempt < 2:
            # Its processes end by themselves; until then they hold the folder's lock.
            subprocess.run(["flock", tmp_path / "out.tmp", "true"], check=True)
    assert done.returncode == 0, done.stderr
    expected = to_huggingface(
        original / "megatron" / "release", original / "hf", tmp_path / "expected", max_shard_bytes=3000
    )
    names = sorted(path.name for path in expected.iterdir())
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == names
    assert filecmp.cmpfiles(tmp_path / "out", expected, names, shallow=False)[0] == names
    assert not (tmp_path / "out.tmp").exists()


def test_what_is_in_the_way_stays(original: Path, tmp_path: Path) -> None:
    (tmp_path / "out.tmp").mkdir()
    (tmp_path / "out.tmp" / "precious").write_text("")
    with pytest.raises(InputError, match=r"out.tmp: is in the way and was not made by a conversion"):
        to_megatron(original / "hf", tmp_path / "out")
    assert (tmp_path / "out.tmp" / "precious").exists()
    (tmp_path / "out.tmp" / "precious").unlink()
    with job_module._locked(tmp_path / "out.tmp"), pytest.raises(InputError, match="another process is writing"):
        to_megatron(original / "hf", tmp_path / "out")
    to_megatron(original / "hf", tmp_path / "out")
