"""Samples rollouts from a checkpoint into a file, with the flags of training.

    megatron-dta sample-rollouts --output rollouts.jsonl --load runs/first [the model's and the sampler's flags]

The output is the rollout batch that training would sample from these weights as number ``--rollout-batch-index``, with
the same prompts and random numbers. Sampling runs in this process and without drafts, also if an argument file (@FILE)
sets servers or drafts; the samples are the same. The file has the sampler's logprobs and rewards, so it can be
inspected, or trained on with ``--rollouts``.
"""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import numpy as np

from megatron_dta.common.command_line import CommandLineParser
from megatron_dta.core.common.errors import InputError
from megatron_dta.core.common.files import check_output
from megatron_dta.core.rollouts.load import write_rollouts
from megatron_dta.training.config.checks.all import check_config
from megatron_dta.training.megatron_args import ENGINE, MESH, TASK, ToolFlags, passed_over

FLAGS = ToolFlags(
    "megatron-dta sample-rollouts",
    ("model", "reward", "treepo", "environment", "agent"),
    f"{MESH} {TASK} {ENGINE} rollout_batch_size over_sampling_batch_size n_samples_per_prompt num_steps_per_rollout "
    "train_iters rollout_stop_degenerate dynamic_sampling dynamic_sampling_max_rounds overlong_buffer_len",
)


def main() -> None:
    """Read the flags, load the weights, sample one rollout batch and write it."""
    parser = CommandLineParser(__doc__)
    parser.add_argument("--output", required=True, metavar="FILE", help="file to write, .jsonl or .parquet")
    parser.add_argument(
        "--rollout-batch-index", type=int, default=0, metavar="N", help="number of the rollout batch (default: 0)"
    )
    arguments, others = parser.parse_known_args()
    if Path(arguments.output).suffix not in (".jsonl", ".parquet"):
        raise InputError(f"--output {arguments.output}: must end in .jsonl or .parquet")
    check_output(arguments.output)
    if not 0 <= arguments.rollout_batch_index < 2**32:
        raise InputError(f"--rollout-batch-index {arguments.rollout_batch_index}: must be in [0, 2^32)")
    if "--rollouts" in others:
        raise InputError("--rollouts names stored rollouts; to sample some give --task or --prompt-data")
    config, left_out = FLAGS.parse(others)
    check_config(config)
    if config.checkpoint.load is None:
        raise InputError("--load is missing: the folder of the checkpoint to sample from")

    # Megatron takes seconds to import, so flags are checked first.
    from megatron_dta.core.model.parallel.mesh import current_mesh
    from megatron_dta.sampling.task import build_task
    from megatron_dta.training.checkpoint.files import required_checkpoint
    from megatron_dta.training.data.template_date import with_date_of
    from megatron_dta.wiring.engines import build_engine
    from megatron_dta.wiring.setup import build_loaded_model
    from megatron_dta.wiring.sources import build_sampling_source

    checkpoint = required_checkpoint("--load", config.checkpoint.load)
    config = with_date_of(config, checkpoint)
    model = config.model
    task = build_task(
        config.sampling, model.max_position_embeddings, model.vocab_size, config.reward, config.checkpoint.hf_checkpoint
    )
    model = build_loaded_model(config, task.tokenizer, checkpoint)
    stop, impl = config.speculation.rollout_stop_degenerate, config.tree.tree_attention_impl
    engine = build_engine(config.sampling, model, None, stop, impl)
    source = build_sampling_source(engine, task, config)
    with closing(source):
        rollouts = source.next_batch(arguments.rollout_batch_index)
    if current_mesh().rank == 0:
        write_rollouts(arguments.output, rollouts)
        mean = np.mean([rollout.reward for rollout in rollouts])
        if left_out:
            print(passed_over(left_out))
        print(f"{len(rollouts)} rollouts from {checkpoint}, mean reward {mean:.3f} -> {arguments.output}")
