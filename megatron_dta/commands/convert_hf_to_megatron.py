"""Converts a Hugging Face checkpoint into a Megatron distributed checkpoint, a few tensors at a time.

    megatron-dta convert-hf-to-megatron --hf-checkpoint models/llama --save checkpoints/llama

The checkpoint can be loaded on any mesh. Train from it with --load checkpoints/llama --finetune. No GPU is used.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

import torch

from megatron_dta.common.command_line import CommandLineParser
from megatron_dta.common.console import Console
from megatron_dta.core.common.files import check_target
from megatron_dta.core.config import ModelConfig
from megatron_dta.training.config import TrainConfig
from megatron_dta.training.config.train import settings_by_flag
from megatron_dta.training.huggingface.config.config import settings_from_hf
from megatron_dta.training.huggingface.files import SafetensorsFolder, carried_text


def parse_arguments() -> argparse.Namespace:
    parser = CommandLineParser(__doc__)
    parser.add_argument("--hf-checkpoint", required=True, metavar="DIR", help="Hugging Face checkpoint (safetensors)")
    parser.add_argument("--save", required=True, metavar="DIR", help="folder to write; it must not exist")
    parser.add_argument(
        "--max-position-embeddings", type=int, metavar="N", help="longest sequence to train on (default: config.json's)"
    )
    return parser.parse_args()


def main() -> None:
    """Check everything, then convert."""
    arguments = parse_arguments()
    source, target, console = Path(arguments.hf_checkpoint), Path(arguments.save), Console()
    check_target(target)
    length = arguments.max_position_embeddings
    settings = settings_from_hf(source, {} if length is None else {"max_position_embeddings": length})
    reader = SafetensorsFolder(source)
    # Megatron takes seconds to import, and would make a part of the model on a GPU.
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    from megatron_dta.training.huggingface.convert import to_megatron

    model = ModelConfig(**settings, bf16=torch.bfloat16 in reader.dtypes)
    common = {"megatron_dta": {"settings": json.dumps(settings_by_flag(TrainConfig(model=model)))}}
    to_megatron(reader, model, common, target)
    carried = carried_text(reader.weight_map)
    if carried is not None:
        line = f"not in it: {carried}; convert-megatron-to-hf --hf-checkpoint {source} adds them to an export unchanged"
        console.print(line, soft_wrap=True)
    console.print(f"saved {target}; train from it with --load {target} --finetune", soft_wrap=True)
