"""Mutated checkpoint files: each is read, or refused by one line that names it, within bounded memory.

    python tests/stress/fuzz_checkpoints.py [--count 5000] [--seed 0] [--kinds index ...] [--whole 20]

For each kind, good files are changed by a few random edits of their bytes or values; all edits follow from the seed.
Each file goes through the code that reads it in the converters and in the loader of training. ``--whole`` of them,
spread over the kinds, also go through the whole process of the converter, which ends with status 0, or 2 and one line.

    safetensors   headers of Hugging Face weights
    index         model.safetensors.index.json
    metadata      .metadata, a pickle: edits of its bytes, of its operations and of its records
    common        common.pt: what is the same on every rank, and the run's settings in it

Status 0 if all were answered well.
"""

from __future__ import annotations

import argparse
import copy
import io
import json
import os
import pickle
import pickletools
import random
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import shared  # noqa: F401 (before the helpers)
import torch

from conversion_cases import save_huggingface, to_megatron
from megatron_dta.core.common.errors import InputError, one_line
from megatron_dta.core.config import ModelConfig
from megatron_dta.training.config import TrainConfig
from megatron_dta.training.config.train import settings_by_flag
from megatron_dta.training.huggingface.peft import LoraSettings
from megatron_dta.training.huggingface.config.config import settings_from_hf
from megatron_dta.training.checkpoint.integrity import CHECKSUMS, check_parts
from megatron_dta.training.huggingface.mappings import ModelShape
from megatron_dta.training.huggingface.files import INDEX, SafetensorsFolder, weight_map_of
from megatron_dta.training.huggingface.to_huggingface import ToHuggingFace, model_of_checkpoint
from megatron_dta.training.huggingface.read_part import ToMegatron
from rollouts_fuzz_cases import damage
from strict_pickle_cases import ATTACKS

KINDS = ("safetensors", "index", "metadata", "common")
TOOLS = Path(__file__).resolve().parents[2] / "tools"
VALUES: list[Any] = [None, True, -1, 0, 1 << 61, 10**400, 1.5, float("nan"), "", "x\0y", "\ud800", "a" * 9000, [], {}]
VALUES += [[[[]]], {"a": {"b": 1}}, [0, -1], [1 << 62], "../x", "F8_E4M3", "/dev/zero", [1, 2, 3], "I64", "x\ny"]

# Operations that metadata have not: names, calls, far places in memory, deep and wide values, sets.
STRANGE = [b"cos\nsystem\n", b"cbuiltins\neval\n", b"r\xff\xff\xff\x7f", b"\x93", b"R", b"\x81", b"b", b"s", b"u"]
STRANGE += [b"\x85" * 3000, b"2\x86" * 90, b"\x8f", b"\x90"]


class Inputs:
    """A good checkpoint in both forms, and mutations of one of its files at a time."""

    def __init__(self, folder: Path, rng: random.Random, kind: str) -> None:
        self.kind, self._rng = kind, rng
        self.hf, self.megatron, self.out = folder / "hf", folder / "megatron" / "release", folder / "out"
        save_huggingface(self.hf, "qwen2", 60)
        to_megatron(self.hf, folder / "megatron")
        settings = settings_by_flag(TrainConfig(model=ModelConfig(**settings_from_hf(self.hf, {}))))
        torch.save({"megatron_dta": {"settings": json.dumps(settings)}}, self.megatron / "common.pt")
        # As somebody would who means harm: nothing says what the files were.
        (self.megatron / CHECKSUMS).unlink()
        weights = sorted(self.hf.glob("*.safetensors"))[1]
        names = {"safetensors": weights, "index": self.hf / INDEX}
        names |= {"metadata": self.megatron / ".metadata", "common": self.megatron / "common.pt"}
        self.path = names[kind]
        self._good = self.path.read_bytes()

    def mutate(self) -> None:
        """Write one mutation."""
        rng, kind = self._rng, self.kind
        if kind in ("metadata", "common") or rng.random() < 0.4:
            make = {"metadata": self._pickle, "common": self._common}.get(kind, self._bytes)
            content = make()
        else:
            content = self._json()
        self.path.write_bytes(content)

    def restore(self) -> None:
        """Let the file be good again."""
        self.path.write_bytes(self._good)

    def read(self) -> str:
        """Read the mutation as converter and trainer do; "read" or "refused", and a line for the latter."""
        try:
            if self.kind in ("safetensors", "index"):
                weight_map_of(self.hf)
                SafetensorsFolder(self.hf)
                shape = ModelShape.of(ModelConfig(**settings_from_hf(self.hf, {})))
                ToMegatron(self.hf, "Qwen2ForCausalLM", shape)
            else:
                check_parts(self.megatron)
                shape = ModelShape.of(model_of_checkpoint(self.megatron, self.hf))
                job = ToHuggingFace(self.megatron, self.hf, "Qwen2ForCausalLM", shape)
                LoraSettings.of(job.checkpoint.settings())
                for parameter in job.parameters[:3]:
                    for piece in job.checkpoint.pieces_of(parameter):
                        piece.read()
        except InputError as error:
            self._told_well(one_line(str(error)))
            return "refused"
        return "read"

    def _told_well(self, message: str) -> None:
        places = (str(self.hf), str(self.megatron), "LoRA")
        if len(message) > 2500 or not any(place in message for place in places):
            raise AssertionError(f"not one line that says where: {message[:300]!r}")

    def command(self) -> list[str]:
        """The converter's command line for the mutation."""
        if self.kind in ("safetensors", "index"):
            tool, flags = "convert_hf_to_megatron.py", ["--hf-checkpoint", self.hf, "--save", self.out]
        else:
            tool = "convert_megatron_to_hf.py"
            flags = ["--load", self.megatron, "--hf-checkpoint", self.hf, "--save-hf", self.out]
        return [sys.executable, str(TOOLS / tool), *map(str, flags)]

    def _bytes(self) -> bytes:
        content = self._good
        for _ in range(self._rng.randrange(1, 4)):
            content = damage(content, self._rng) or b"x"
        return content

    def _json(self) -> bytes:
        """Values of the header or the index replaced, entries added, renamed, left out, nested deep."""
        rng, start = self._rng, 0
        text = self._good
        if self.kind == "safetensors":
            start = 8 + int.from_bytes(text[:8], "little")
            text = text[8:start]
        content = json.loads(text)
        table = content["weight_map"] if self.kind == "index" and rng.random() < 0.8 else content
        for _ in range(rng.randrange(1, 4)):
            name, edit = rng.choice(list(table) or ["x"]), rng.randrange(6)
            if edit == 0:
                table.pop(name, None)
            elif edit == 1:
                table[str(rng.choice(VALUES))[:300]] = table.get(name)
            elif edit == 2 and isinstance(table.get(name), dict) and table[name]:
                table[name][rng.choice(list(table[name]))] = rng.choice(VALUES)
            elif edit == 3 and isinstance(table.get(name), dict):
                parts = [part for part in table[name].values() if isinstance(part, list) and part]
                for part in parts[:1]:
                    part[rng.randrange(len(part))] = rng.choice(VALUES)
            else:
                table[name] = copy.deepcopy(rng.choice(VALUES))
        found = json.dumps(content).encode()
        if rng.random() < 0.1:
            depth = rng.choice((900, 1100, 100_000))
            found = rng.choice(
                (b"[" * depth, b'{"a":' * depth, b"[" * depth + b"]" * depth, found[:-1] + b',"a":' + b"[" * depth)
            )
        if self.kind == "index":
            return found
        length = rng.choice((len(found),) * 6 + (len(found) + 1, 1 << 62, 0, 100_000_001))
        return length.to_bytes(8, "little") + found + self._good[start:]

    def _pickle(self) -> bytes:
        """Bytes, operations or records of the metadata changed; known attacks."""
        rng, edit = self._rng, self._rng.randrange(4)
        if edit == 0:
            return self._bytes()
        if edit == 1:
            content = rng.choice(list(ATTACKS.values()))
            return content if rng.random() < 0.3 else damage(content or b"x", rng)
        if edit == 2:
            spans = [place for _, _, place in pickletools.genops(self._good)] + [len(self._good)]
            operations = [self._good[first:last] for first, last in pairwise(spans)]
            for _ in range(rng.randrange(1, 5)):
                at, other = rng.randrange(len(operations)), rng.randrange(len(operations))
                change = rng.randrange(4)
                if change == 0:
                    del operations[at]
                elif change == 1:
                    operations[at], operations[other] = operations[other], operations[at]
                elif change == 2:
                    operations.insert(at, operations[other] * rng.choice((1, 2, 1000)))
                else:
                    operations.insert(at, rng.choice(STRANGE))
            return b"".join(operations)
        found = pickle.loads(self._good)
        for _ in range(rng.randrange(1, 3)):
            table = rng.choice((found.state_dict_metadata, found.storage_data))
            if not isinstance(table, dict) or not table:
                break
            name = rng.choice(list(table))
            record = table[name]
            if rng.random() < 0.3:
                table[name] = rng.choice(VALUES)
            elif hasattr(record, "__dict__") and vars(record):
                object.__setattr__(
                    record, rng.choice(list(vars(record))), rng.choice([*VALUES, torch.Size((3, 1 << 40))])
                )
        if rng.random() < 0.2:
            setattr(found, rng.choice(list(vars(found))), rng.choice(VALUES))
        return pickle.dumps(found)

    def _common(self) -> bytes:
        rng = self._rng
        if rng.random() < 0.5:
            return self._bytes()
        content = torch.load(io.BytesIO(self._good), weights_only=True)
        settings = json.loads(content["megatron_dta"]["settings"])
        name = rng.choice(list(settings))
        lora = ("--lora-rank", "--lora-alpha", "--lora-target-modules", "--max-position-embeddings")
        settings[rng.choice((name, *lora))] = rng.choice(VALUES)
        content["megatron_dta"]["settings"] = json.dumps(settings)
        if rng.random() < 0.3:
            content["megatron_dta"] = rng.choice([*VALUES, {"settings": rng.choice([*VALUES, "[" * 100_000])}])
        saved = io.BytesIO()
        torch.save(rng.choice((content, content, content, rng.choice(VALUES))), saved)
        return saved.getvalue()


def fuzz(kind: str, count: int, seed: int, folder: Path, whole: int = 0) -> tuple[Counter[str], list[str]]:
    """``count`` mutations of a kind: how they were answered, and what was wrong about the answers."""
    rng = random.Random(f"{seed} {kind}")
    inputs, outcomes, wrong = Inputs(folder, rng, kind), Counter(), []
    every = count // whole if whole else count + 1
    for number in range(count):
        inputs.mutate()
        try:
            outcomes[inputs.read()] += 1
            if number % every == every - 1:
                _whole_process(inputs)
                outcomes["whole processes"] += 1
        except Exception as error:
            wrong.append(f"{kind} {number}: {type(error).__name__}: {one_line(str(error))}"[:300])
    inputs.restore()
    if inputs.read() != "read":
        wrong.append(f"{kind}: the good file is refused")
    return outcomes, wrong


def _whole_process(inputs: Inputs) -> None:
    """Convert, in a process that may take 2 GB more than it takes to start."""
    root = Path(__file__).resolve().parents[2]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root), str(root / "kernels")])}
    done = subprocess.run(inputs.command(), capture_output=True, text=True, env=environment, timeout=300)
    if done.returncode not in (0, 2) or "Traceback" in done.stderr:
        raise AssertionError(f"status {done.returncode}: {done.stderr[-300:]}")
    if done.returncode == 2 and (done.stderr.count("\n") != 1 or not done.stderr.startswith("error: ")):
        raise AssertionError(f"not one line: {done.stderr[-300:]!r}")
    if done.returncode == 2 and inputs.out.exists():
        raise AssertionError("something is left of a refused conversion")
    shutil.rmtree(inputs.out, ignore_errors=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=5000, help="files of each kind")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--whole", type=int, default=20, help="of each kind through the converter's whole process")
    options = parser.parse_args()
    total = 0
    for kind in options.kinds:
        began, before = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        with tempfile.TemporaryDirectory() as folder:
            outcomes, wrong = fuzz(kind, options.count, options.seed, Path(folder), options.whole)
        counted = ", ".join(f"{number} {name}" for name, number in sorted(outcomes.items()))
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
        print(
            f"{kind}: {options.count} files in {time.monotonic() - began:.0f} s: {counted}, {len(wrong)} wrong; "
            f"{grown:.0f} MiB more than before",
            flush=True,
        )
        for line in wrong[:10]:
            print(f"  {line}")
        total += len(wrong)
    return 1 if total else 0


if __name__ == "__main__":
    sys.exit(main())
