"""Measures both conversions of a checkpoint with the widths of a 70B model: memory, and speed against a copy.

    python benchmarks/conversion.py --folder /tmp/conversion --num-layers 2

A checkpoint of the given depth, of random numbers, is generated in the folder. Then its files are copied, converted to
Megatron's form and back. Memory is the largest that a conversion allocates, without the pages of files, which the
system takes back when it needs them. More layers must not need more of it.
"""

from __future__ import annotations

import argparse
import contextlib
import filecmp
import json
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import torch

from megatron_dta.common.command_line import CommandLineParser
from megatron_dta.common.entry_point import run_entry_point
from megatron_dta.core.common.errors import InputError
from megatron_dta.training.huggingface.files import INDEX, lay_out, write_file
from megatron_dta.training.huggingface.mappings import ModelShape, parameters_of, tensors_of

TOOLS = Path(__file__).resolve().parent.parent / "tools"
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}


def parse_arguments() -> argparse.Namespace:
    parser = CommandLineParser(__doc__)
    parser.add_argument("--folder", required=True, help="where to write; needs four times the checkpoint's size")
    parser.add_argument(
        "--num-layers", type=int, nargs="+", default=[2], help="of the checkpoint; several are compared"
    )
    parser.add_argument("--divide-widths", type=int, default=1, metavar="N", help="all widths by N (default 1)")
    return parser.parse_args()


def write_checkpoint(folder: Path, layers: int, divisor: int) -> int:
    """A random checkpoint, a file for each layer; returns its bytes."""
    config = {**CONFIG, "num_hidden_layers": layers}
    for name in ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size"):
        config[name] = CONFIG[name] // divisor
    config["num_key_value_heads"] = min(CONFIG["num_key_value_heads"], config["num_attention_heads"])
    sizes = [
        config[name] for name in ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    ]
    shape = ModelShape(layers, *sizes, sizes[0] // sizes[2], config["vocab_size"])
    weight_map = {}
    for name in tensors_of(parameters_of("LlamaForCausalLM", shape)):
        layer = re.search(r"layers\.(\d+)", name)
        weight_map[name] = f"model-{'rest' if layer is None else layer[1]}.safetensors"
    shapes = {
        name: (dims, torch.bfloat16) for name, dims in tensors_of(parameters_of("LlamaForCausalLM", shape)).items()
    }
    folder.mkdir(parents=True)
    for file, names in lay_out(shapes, weight_map).items():
        write_file(folder / file, {name: torch.randn(shapes[name][0]).bfloat16() for name in names})
    size = sum(path.stat().st_size for path in folder.iterdir())
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}), encoding="utf-8")
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return size


def run_measured(command: list[str]) -> dict[str, float]:
    """Run a program: its seconds, and the largest memory that it has allocated, looked at every 20 ms."""
    start, most = time.perf_counter(), 0
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    while process.poll() is None:
        with contextlib.suppress(OSError):
            match = re.search(r"RssAnon:\s+(\d+)", Path(f"/proc/{process.pid}/status").read_text(encoding="utf-8"))
            most = max(most, int(match[1]) * 1024 if match else 0)
        time.sleep(0.02)
    if process.returncode:
        raise InputError(f"{command[1]} failed with status {process.returncode}")
    return {"seconds": round(time.perf_counter() - start, 2), "allocated_bytes": most}


def benchmark(folder: Path, layers: int, divisor: int) -> dict[str, object]:
    """A copy and both conversions."""
    source, megatron, back = (folder / name for name in ("hf", "megatron", "back"))
    size = write_checkpoint(source, layers, divisor)
    forth = [sys.executable, str(TOOLS / "convert_hf_to_megatron.py"), "--hf-checkpoint", str(source)]
    home = [sys.executable, str(TOOLS / "convert_megatron_to_hf.py"), "--load", str(megatron)]
    start = time.perf_counter()
    shutil.copytree(source, folder / "copy")
    result = {
        "num_layers": layers,
        "bytes": size,
        "copy": {"seconds": round(time.perf_counter() - start, 2)},
        "to_megatron": run_measured([*forth, "--save", str(megatron)]),
        "to_hf": run_measured([*home, "--hf-checkpoint", str(source), "--save-hf", str(back)]),
    }
    names = [path.name for path in source.glob("*.safetensors")]
    return result | {"byte_for_byte": sorted(filecmp.cmpfiles(source, back, names, shallow=False)[0]) == sorted(names)}


def main() -> int:
    arguments = parse_arguments()
    folder = Path(arguments.folder) / "benchmark_conversion"
    if folder.exists():
        raise InputError(f"{folder}: exists already; delete it first")
    results = []
    try:
        for layers in arguments.num_layers:
            results.append(benchmark(folder, layers, arguments.divide_widths))
            print(json.dumps(results[-1]), flush=True)
            shutil.rmtree(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return 0 if all(result["byte_for_byte"] for result in results) else 1


if __name__ == "__main__":
    run_entry_point(main)
