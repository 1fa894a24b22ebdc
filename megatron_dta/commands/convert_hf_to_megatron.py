"""Converts a Hugging Face checkpoint into a Megatron distributed checkpoint, a few tensors at a time.

    megatron-dta convert-hf-to-megatron --hf-checkpoint models/llama --save checkpoints/llama \
        --tensor-model-parallel-size 8 --processes 4

The mesh sizes determine how tensors are divided into files, so that each rank of that mesh reads few whole pieces; the
checkpoint can be loaded on any other mesh too. Train from it with --load checkpoints/llama --finetune. An interrupted
conversion continues when the same command runs again.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch

from megatron_dta.common.command_line import CommandLineParser
from megatron_dta.common.console import Console
from megatron_dta.core.common.errors import InputError
from megatron_dta.core.config import ModelConfig, ParallelConfig
from megatron_dta.training.config import TrainConfig
from megatron_dta.training.config.train import settings_by_flag
from megatron_dta.training.huggingface.config.config import architecture, read_hf_config, settings_from_hf
from megatron_dta.training.huggingface.files import carried_text
from megatron_dta.training.huggingface.job import check_target, run_job
from megatron_dta.training.huggingface.mappings import ModelShape
from megatron_dta.training.huggingface.read_part import ToMegatron

DTYPES = {"auto": None, "float32": torch.float32, "bfloat16": torch.bfloat16}


def parse_arguments() -> argparse.Namespace:
    parser = CommandLineParser(__doc__)
    parser.add_argument("--hf-checkpoint", required=True, metavar="DIR", help="Hugging Face checkpoint (safetensors)")
    parser.add_argument("--save", required=True, metavar="DIR", help="folder to write; it must not exist")
    for name in ("tensor", "pipeline", "expert"):
        flag = f"--{name}-model-parallel-size"
        parser.add_argument(
            flag, type=int, default=1, metavar="N", help="size in the mesh that will load it (default 1)"
        )
    parser.add_argument(
        "--params-dtype", choices=DTYPES, default="auto", help="dtype of the weights (default: auto, as they are)"
    )
    parser.add_argument(
        "--make-vocab-size-divisible-by", type=int, metavar="N", help="pad the embedding to a multiple (default 1)"
    )
    parser.add_argument(
        "--max-position-embeddings", type=int, metavar="N", help="longest sequence to train on (default: config.json's)"
    )
    parser.add_argument(
        "--processes", type=int, default=1, metavar="N", help="number of processes that write files (default 1)"
    )
    arguments = parser.parse_args()
    for name, value in vars(arguments).items():
        if isinstance(value, int) and value < 1:
            raise InputError(f"--{name.replace('_', '-')} is {value}; it must be at least 1")
    return arguments


def main() -> None:
    """Check everything, then convert."""
    arguments = parse_arguments()
    source, target, console = Path(arguments.hf_checkpoint), Path(arguments.save), Console()
    check_target(target)
    choices = ("make_vocab_size_divisible_by", "max_position_embeddings")
    explicit = {name: getattr(arguments, name) for name in choices if getattr(arguments, name) is not None}
    settings = settings_from_hf(source, explicit)
    dtype = DTYPES[arguments.params_dtype]
    parallel = ParallelConfig(
        tensor_model_parallel_size=arguments.tensor_model_parallel_size,
        pipeline_model_parallel_size=arguments.pipeline_model_parallel_size,
        expert_model_parallel_size=arguments.expert_model_parallel_size,
    )
    job = ToMegatron(
        source,
        architecture(read_hf_config(source)).architecture,
        ModelShape.of(ModelConfig(**settings)),
        parallel.tensor_model_parallel_size,
        parallel.pipeline_model_parallel_size,
        parallel.expert_model_parallel_size,
        dtype,
    )
    bf16 = job.dtype_of(job.parameters[0]) is torch.bfloat16
    config = TrainConfig(model=ModelConfig(**settings, bf16=bf16), parallel=parallel)
    job.common = {"megatron_dta": {"settings": json.dumps(settings_by_flag(config))}}
    run_job(job, target, arguments.processes, console)
    carried = carried_text(job.reader.weight_map)
    if carried is not None:
        line = f"not in it: {carried}; convert-megatron-to-hf --hf-checkpoint {source} adds them to an export unchanged"
        console.print(line, soft_wrap=True)
    console.print(f"saved {target}; train from it with --load {target} --finetune", soft_wrap=True)
