"""Measures both conversions of a checkpoint with the widths of a 70B model: resident memory, and speed against a copy.

    python benchmarks/conversion.py --folder /tmp/conversion --num-layers 2 --processes 2

A checkpoint of the given depth, of random bytes, is generated in the folder. Then the files are copied (cp), converted
to Megatron's form and back, each time read from the disk and flushed to it. Memory is the largest sum of the resident
memory of all processes of a conversion. More layers must not need more of it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from megatron_dta.common.command_line import CommandLineParser
from megatron_dta.core.common.errors import InputError, run_entry_point
from megatron_dta.training.huggingface.files import INDEX
from megatron_dta.training.huggingface.mappings import ModelShape, parameters_of, tensors_of
from megatron_dta.training.huggingface.safetensors_output import SafetensorsOutput, index_of, lay_out

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
    parser.add_argument("--folder", required=True, help="where to write; needs three times the checkpoint's size")
    parser.add_argument(
        "--num-layers", type=int, nargs="+", default=[2], help="of the checkpoint; several are compared"
    )
    parser.add_argument("--divide-widths", type=int, default=1, metavar="N", help="all widths by N (default 1)")
    parser.add_argument("--tensor-model-parallel-size", type=int, default=8, help="of the target (default 8)")
    parser.add_argument("--processes", type=int, default=2, help="of a conversion (default 2)")
    parser.add_argument("--repeats", type=int, default=3, help="measurements in turn (default 3)")
    return parser.parse_args()


def write_checkpoint(folder: Path, layers: int, divisor: int) -> int:
    """A random checkpoint in files of 5 GB; returns its bytes."""
    config = {**CONFIG, "num_hidden_layers": layers}
    for name in ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size"):
        config[name] = CONFIG[name] // divisor
    config["num_key_value_heads"] = min(CONFIG["num_key_value_heads"], config["num_attention_heads"])
    shape = ModelShape(
        layers,
        config["hidden_size"],
        config["intermediate_size"],
        config["num_attention_heads"],
        config["num_key_value_heads"],
        config["hidden_size"] // config["num_attention_heads"],
        config["vocab_size"],
    )
    tensors = tensors_of(parameters_of("LlamaForCausalLM", shape))
    layouts = lay_out({name: (dims, torch.bfloat16) for name, dims in tensors.items()}, 5_000_000_000)
    folder.mkdir(parents=True)
    random = np.random.default_rng(0)
    for layout in layouts:
        with SafetensorsOutput(folder, layout) as output:
            for name, (dims, _) in layout.shapes.items():
                width = torch.Size(dims[1:]).numel()
                step = max(1, (1 << 26) // (2 * width))
                for row in range(0, dims[0], step):
                    count = min(step, dims[0] - row)
                    numbers = random.integers(0, 1 << 15, (count, *dims[1:]), dtype=np.int16)
                    output.write(name, row, torch.from_numpy(numbers).view(torch.bfloat16))
            output.finish()
    index = index_of(layouts)
    if index is not None:
        (folder / INDEX).write_text(index, encoding="utf-8")
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return sum(layout.size for layout in layouts)


def forget_cached(folder: Path) -> None:
    """Let the next reader of the files go to the disk."""
    for path in folder.rglob("*"):
        if path.is_file():
            with open(path, "rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def copy(source: Path, target: Path) -> int:
    """A plain copy that reaches the disk."""
    subprocess.run(["cp", "-r", str(source), str(target)], check=True)
    for path in target.iterdir():
        with open(path, "rb") as file:
            os.fsync(file.fileno())
    return 0


def run_measured(command: list[str]) -> int:
    """Run a tool; the largest sum of resident bytes of its processes, looked at every 20 ms."""
    process, most = subprocess.Popen(command, stdout=subprocess.DEVNULL), 0
    while process.poll() is None:
        most = max(most, sum(resident(number) for number in family(process.pid)))
        time.sleep(0.02)
    if process.returncode:
        raise InputError(f"{command[1]} failed with status {process.returncode}")
    return most


def family(process: int) -> list[int]:
    """A process and all processes that it has started."""
    members = [process]
    for member in members:
        with contextlib.suppress(OSError):
            for task in Path(f"/proc/{member}/task").iterdir():
                members += [int(child) for child in (task / "children").read_text(encoding="utf-8").split()]
    return members


def resident(process: int) -> int:
    with contextlib.suppress(OSError, IndexError):
        return int(Path(f"/proc/{process}/statm").read_text(encoding="utf-8").split()[1]) * os.sysconf("SC_PAGESIZE")
    return 0


def measure(act: Callable[[], int], source: Path, target: Path) -> tuple[float, int]:
    """Seconds, and most resident bytes, of writing ``target`` from ``source``."""
    shutil.rmtree(target, ignore_errors=True)
    # What was deleted or is still to be written before would be paid for in the time measured.
    os.sync()
    forget_cached(source)
    start = time.perf_counter()
    most = act()
    return time.perf_counter() - start, most


def benchmark(arguments: argparse.Namespace, folder: Path, layers: int) -> dict[str, object]:
    """A copy and both conversions in turn, so that whatever else the machine does weighs on all of them."""
    source, megatron, back, copied = (folder / name for name in ("hf", "megatron", "back", "copy"))
    size = write_checkpoint(source, layers, arguments.divide_widths)
    common = ["--processes", str(arguments.processes)]
    tensor = ["--tensor-model-parallel-size", str(arguments.tensor_model_parallel_size)]
    forth = [sys.executable, str(TOOLS / "convert_hf_to_megatron.py"), "--hf-checkpoint", str(source)]
    forth += ["--save", str(megatron), *tensor, *common]
    home = [sys.executable, str(TOOLS / "convert_megatron_to_hf.py"), "--load", str(megatron)]
    home += ["--hf-checkpoint", str(source), "--save-hf", str(back), *common]
    runs: dict[str, list[tuple[float, int]]] = {"copy": [], "to_megatron": [], "to_hf": []}
    for _ in range(arguments.repeats):
        runs["copy"].append(measure(lambda: copy(source, copied), source, copied))
        shutil.rmtree(copied)
        runs["to_megatron"].append(measure(lambda: run_measured(forth), source, megatron))
        runs["to_hf"].append(measure(lambda: run_measured(home), megatron, back))
    result: dict[str, object] = {"num_layers": layers, "bytes": size, "processes": arguments.processes}
    for name, found in runs.items():
        seconds = statistics.median(run[0] for run in found)
        result[name] = {"seconds": round(seconds, 2), "bytes_per_second": round(size / seconds)}
        if name != "copy":
            ratios = [plain[0] / run[0] for plain, run in zip(runs["copy"], found, strict=True)]
            result[name] |= {"of_copy": [round(ratio, 3) for ratio in sorted(ratios)]}
            result[name] |= {"resident_bytes": max(run[1] for run in found)}
    same = all(path.read_bytes() == (back / path.name).read_bytes() for path in source.glob("*.json"))
    for path in source.glob("*.safetensors"):
        same = same and not subprocess.run(["cmp", str(path), str(back / path.name)], check=False).returncode
    return {**result, "byte_for_byte": same}


def main() -> int:
    arguments = parse_arguments()
    folder = Path(arguments.folder) / "benchmark_conversion"
    if folder.exists():
        raise InputError(f"{folder}: exists already; delete it first")
    results = []
    try:
        for layers in arguments.num_layers:
            results.append(benchmark(arguments, folder, layers))
            print(json.dumps(results[-1]), flush=True)
            shutil.rmtree(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return 0 if all(result["byte_for_byte"] for result in results) else 1


if __name__ == "__main__":
    run_entry_point(main)
