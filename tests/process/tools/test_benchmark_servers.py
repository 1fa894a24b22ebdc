"""The benchmarks of servers: one in another process has the trainer's bytes, requests cost a core, vLLM decodes."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

import vllm_decode
from forked import run_python


def test_a_folder_on_a_cpu(tmp_path: Path) -> None:
    found = run_python(
        [
            "benchmarks/weight_transfer.py", "--ways", "folder", "--folder", str(tmp_path / "weights"),
            "--repeats", "1", "--output", str(tmp_path / "found.json"),
        ]
    )  # fmt: skip
    assert found.returncode == 0, found.stderr
    (row,) = json.loads((tmp_path / "found.json").read_text())["rows"]
    assert row["way"] == "folder"
    assert 0 < row["pause_s"] <= row["update_s"]
    assert not list((tmp_path / "weights").iterdir())


def test_shared_memory_needs_a_gpu() -> None:
    found = run_python(["benchmarks/weight_transfer.py", "--ways", "ipc"])
    assert found.returncode == 2
    assert "--ways ipc needs a GPU" in found.stderr


def test_vllm_needs_a_gpu() -> None:
    found = run_python(["benchmarks/weight_transfer.py", "--ways", "folder", "--receiver", "vllm"])
    assert found.returncode == 2
    assert "--receiver vllm needs a GPU" in found.stderr


def test_decoding_of_vllm_needs_it_and_a_gpu() -> None:
    found = run_python(["benchmarks/vllm_decode.py"])
    assert found.returncode == 2
    assert "vLLM cannot be imported" in found.stderr or "vLLM is measured on a GPU" in found.stderr


@pytest.mark.parametrize("flags", ["--batch 0", "--runs 0", "--short-tokens 3 --response-tokens 2"])
def test_decoding_of_vllm_refuses(flags: str) -> None:
    found = run_python(["benchmarks/vllm_decode.py", *flags.split()])
    assert found.returncode == 2
    assert flags.split()[0] in found.stderr


def test_decoding_of_vllm_measures_the_shape_of_the_engine() -> None:
    arguments = argparse.Namespace(shape="1.7b", prompt_tokens=128, response_tokens=128, short_tokens=33)
    assert vllm_decode.num_parameters(arguments) == 1_720_574_976
    config = vllm_decode.config_from_settings(vllm_decode.model_config(arguments))
    assert config["architectures"] == ["Qwen3ForCausalLM"]
    assert config["tie_word_embeddings"]
    # 208 cached positions of 112 KiB each, on the mean of the passes that decode tokens 34 to 129.
    read = 2 * 1_720_574_976 + 64 * 208 * 112 * 1024
    assert vllm_decode.bound_seconds(arguments, 64, 1e12) == pytest.approx(read / 1e12)


def test_requests_are_counted(tmp_path: Path) -> None:
    flags = "--servers 2 --requests-per-server 3 --response-tokens 40 --seconds 0.01 --responses 20"
    found = run_python(["benchmarks/server_requests.py", *flags.split(), "--output", str(tmp_path / "found.json")])
    assert found.returncode == 0, found.stderr
    (row,) = json.loads((tmp_path / "found.json").read_text())["rows"]
    assert row["responses"] == 20
    assert row["core_s"] * row["responses_per_core_s"] == pytest.approx(20)
