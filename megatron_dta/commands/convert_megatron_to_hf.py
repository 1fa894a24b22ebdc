"""Converts a Megatron distributed checkpoint, as saved by training, into a Hugging Face checkpoint.

    megatron-dta convert-megatron-to-hf --load runs/first --hf-checkpoint models/llama --save-hf models/trained

Configuration, tokenizer and generation settings are copied from --hf-checkpoint, and name the token that ended
trained responses; tensors that lie beside the text model are copied too. Its config.json must describe the model.
Without --hf-checkpoint they follow from the settings of the run, for example of a run from random weights. LoRA
adapters are merged into the weights, in float32; with --adapter-only they are written alone, in PEFT's format.
Tensors are converted a few at a time. An interrupted conversion continues when the same command runs again.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

import torch

from megatron_dta.common.command_line import CommandLineParser
from megatron_dta.common.console import Console
from megatron_dta.core.common.errors import InputError
from megatron_dta.training.checkpoint.files import required_checkpoint
from megatron_dta.training.checkpoint.integrity import SKIP_FLAG, check_checkpoint
from megatron_dta.training.huggingface.config.config import architecture, read_hf_config
from megatron_dta.training.huggingface.config.config_output import (
    config_from_settings,
    model_from_settings,
    write_template,
)
from megatron_dta.training.huggingface.files import prefix_in
from megatron_dta.training.huggingface.job import Job, check_target, run_job
from megatron_dta.training.huggingface.mappings import ModelShape, parameters_of
from megatron_dta.training.huggingface.megatron_files import MegatronCheckpoint
from megatron_dta.training.huggingface.peft import LoraSettings, ToPeft, base_of
from megatron_dta.training.huggingface.to_huggingface import ToHuggingFace, model_of_checkpoint

DTYPES = {"auto": None, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def parse_arguments() -> argparse.Namespace:
    parser = CommandLineParser(__doc__)
    parser.add_argument("--load", required=True, metavar="DIR", help="folder of a run, or one of its checkpoints")
    parser.add_argument(
        "--hf-checkpoint",
        metavar="DIR",
        help="checkpoint with config.json and the tokenizer (default: made from the run's settings)",
    )
    parser.add_argument("--save-hf", required=True, metavar="DIR", help="folder to write; it must not exist")
    parser.add_argument(
        "--params-dtype", choices=DTYPES, default="auto", help="dtype of the weights (default: auto, as they are)"
    )
    parser.add_argument(
        "--max-shard-size",
        type=float,
        metavar="GB",
        help="maximum size of a file (default: the division of --hf-checkpoint if it has the same tensors, else 5)",
    )
    parser.add_argument(
        "--adapter-only", action="store_true", help="write only the LoRA adapters, as PEFT loads them, into --save-hf"
    )
    parser.add_argument(
        SKIP_FLAG,
        dest="skip_checkpoint_checks",
        action="store_true",
        help="skip the checksums of the checkpoint's files, and accept a folder that other users may write to",
    )
    parser.add_argument(
        "--processes", type=int, default=1, metavar="N", help="number of processes that write files (default 1)"
    )
    arguments = parser.parse_args()
    if arguments.processes < 1:
        raise InputError(f"--processes is {arguments.processes}; it must be at least 1")
    if arguments.adapter_only and arguments.max_shard_size is not None:
        raise InputError("--max-shard-size has no effect with --adapter-only, which writes one file; leave it out")
    if arguments.adapter_only and arguments.hf_checkpoint is None:
        raise InputError("--adapter-only needs --hf-checkpoint, the base that the adapters belong to")
    if arguments.max_shard_size is not None and not arguments.max_shard_size > 0:
        raise InputError(f"--max-shard-size is {arguments.max_shard_size}; it must be above 0")
    return arguments


def _job(arguments: argparse.Namespace, source: Path, template: Path) -> Job:
    """Return the conversion job for the checkpoint ``source``."""
    name, dtype = architecture(read_hf_config(template)).architecture, DTYPES[arguments.params_dtype]
    shape = ModelShape.of(model_of_checkpoint(source, template))
    if arguments.adapter_only:
        return ToPeft(source, template, parameters_of(name, shape, prefix_in(template)), dtype)
    size = None if arguments.max_shard_size is None else int(arguments.max_shard_size * 1e9)
    end_id = MegatronCheckpoint(source).end_id()
    if LoraSettings.of(MegatronCheckpoint(source).settings()) is None:
        return ToHuggingFace(source, template, name, shape, dtype, size, end_id=end_id)
    if not arguments.skip_checkpoint_checks:
        check_checkpoint(base_of(source))
    return ToHuggingFace(base_of(source), template, name, shape, dtype, size, adapters=source, end_id=end_id)


def main() -> None:
    """Check everything, then convert."""
    arguments = parse_arguments()
    target, console = Path(arguments.save_hf), Console()
    check_target(target)
    source = required_checkpoint("--load", arguments.load)
    if not arguments.skip_checkpoint_checks:
        check_checkpoint(source)
    if arguments.hf_checkpoint is not None:
        run_job(_job(arguments, source, Path(arguments.hf_checkpoint)), target, arguments.processes, console)
    else:
        template = target.with_name(target.name + ".template")
        _write_template(source, template, console)
        try:
            run_job(_job(arguments, source, template), target, arguments.processes, console)
        finally:
            shutil.rmtree(template, ignore_errors=True)
    console.print(f"saved {target}", soft_wrap=True)


def _write_template(source: Path, folder: Path, console: Console) -> None:
    """Write the configuration that the settings of the run imply, in place of --hf-checkpoint."""
    settings = MegatronCheckpoint(source).settings()
    if settings is None:
        raise InputError(f"{source}: does not say which model it is of; give --hf-checkpoint")
    try:
        config, tokenizer = config_from_settings(model_from_settings(settings)), settings.get("--tokenizer-model")
        write_template(folder, config, tokenizer if isinstance(tokenizer, str) else None)
    except InputError as error:
        raise InputError(f"{source}: {error}") from error
    except OSError as error:
        raise InputError(f"{folder}: cannot be written ({error.strerror})") from error
    origin = settings.get("--load-hf") or settings.get("--hf-checkpoint")
    if isinstance(origin, str):
        line = f"the text model alone: give --hf-checkpoint {origin} for the other files and tensors of that folder"
        console.print(line, soft_wrap=True)
