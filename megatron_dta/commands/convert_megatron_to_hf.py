"""Converts a Megatron distributed checkpoint, as saved by training, into a Hugging Face checkpoint.

    megatron-dta convert-megatron-to-hf --load runs/first --hf-checkpoint models/llama --save-hf models/trained

Configuration, tokenizer and generation settings are copied from --hf-checkpoint, and name the token that ended
trained responses; tensors that lie beside the text model are copied too. Its config.json must describe the model.
Without --hf-checkpoint they follow from the settings of the run, for example of a run from random weights. LoRA
adapters are merged into the weights, in float32; with --adapter-only they are written alone, in PEFT's format.
One file of the output is held in memory at a time. No GPU is used.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from megatron_dta.common.command_line import CommandLineParser
from megatron_dta.common.console import Console
from megatron_dta.core.common.errors import InputError
from megatron_dta.core.common.files import check_target
from megatron_dta.training.checkpoint.integrity import SKIP_FLAG, check_checkpoint
from megatron_dta.training.huggingface.config.config_output import (
    config_from_settings,
    model_from_settings,
    write_template,
)

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
        "--adapter-only", action="store_true", help="write only the LoRA adapters, as PEFT loads them, into --save-hf"
    )
    parser.add_argument(
        SKIP_FLAG,
        dest="skip_checkpoint_checks",
        action="store_true",
        help="skip the checksums of the checkpoint's files, and accept a folder that other users may write to",
    )
    arguments = parser.parse_args()
    if arguments.adapter_only and arguments.hf_checkpoint is None:
        raise InputError("--adapter-only needs --hf-checkpoint, the base that the adapters belong to")
    return arguments


def main() -> None:
    """Check everything, then convert."""
    arguments = parse_arguments()
    target, console = Path(arguments.save_hf), Console()
    check_target(target)
    # Megatron takes seconds to import, and would make a part of the model on a GPU.
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    from megatron_dta.training.checkpoint.files import required_checkpoint
    from megatron_dta.training.huggingface.convert import to_huggingface, to_peft

    source, dtype = required_checkpoint("--load", arguments.load), DTYPES[arguments.params_dtype]
    if not arguments.skip_checkpoint_checks:
        check_checkpoint(source)
    with TemporaryDirectory() as scratch:
        template = Path(arguments.hf_checkpoint or scratch)
        if arguments.hf_checkpoint is None:
            _write_template(source, template, console)
        if arguments.adapter_only:
            to_peft(source, template, target, dtype)
        else:
            to_huggingface(source, template, target, dtype, not arguments.skip_checkpoint_checks)
    console.print(f"saved {target}", soft_wrap=True)


def _write_template(source: Path, folder: Path, console: Console) -> None:
    """Write the configuration that the settings of the run imply, in place of --hf-checkpoint."""
    from megatron_dta.training.checkpoint.reader import read_common, saved_settings

    settings = saved_settings(source, read_common(source))
    if settings is None:
        raise InputError(f"{source}: does not say which model it is of; give --hf-checkpoint")
    try:
        config, tokenizer = config_from_settings(model_from_settings(settings)), settings.get("--tokenizer-model")
        write_template(folder, config, tokenizer if isinstance(tokenizer, str) else None)
    except InputError as error:
        raise InputError(f"{source}: {error}") from error
    origin = settings.get("--load-hf") or settings.get("--hf-checkpoint")
    if isinstance(origin, str):
        line = f"the text model alone: give --hf-checkpoint {origin} for the other files and tensors of that folder"
        console.print(line, soft_wrap=True)
