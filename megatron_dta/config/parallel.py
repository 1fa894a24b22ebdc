"""The mesh: tensor, sequence and pipeline parallelism; the processes that remain are data-parallel.

Flags of what is not there yet exist so that a command written for Megatron fails with a reason.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

from megatron_dta.config.options import option


@dataclass
class ParallelConfig:
    """Sizes of Megatron's process groups."""

    tensor_model_parallel_size: int = option(1, "Processes that share every layer.", minimum=1)
    pipeline_model_parallel_size: int = option(1, "Stages that share the stack of layers.", minimum=1)
    num_virtual_stages_per_pipeline_rank: int = option(
        1, "Parts of the stack on every pipeline rank (interleaved stages).", minimum=1
    )
    pipeline_model_parallel_layout: str | None = option(
        None,
        "Layers of each stage in Megatron's notation (E embedding, t layer, L loss, | between stages, as in "
        "'Ett|ttt|tttL'), or auto for the division that the cost model finds best (default: equal numbers).",
    )
    pipeline_in_flight_tokens: int | None = option(
        None,
        "Most tokens whose activations a pipeline stage holds (default: 1.5 x what one stage alone would hold).",
        minimum=1,
    )
    context_parallel_size: int = option(1, "Processes that share a sequence; only 1 so far.", minimum=1)
    expert_model_parallel_size: int = option(1, "Processes that share the experts of a layer.", minimum=1)
    expert_tensor_parallel_size: int | None = option(
        None, "Processes that share each expert (default: --tensor-model-parallel-size).", minimum=1
    )
    use_distributed_optimizer: bool = option(False, "Divide the optimizer's state among the data-parallel processes.")
    overlap_grad_reduce: bool = option(
        False, "Add up the replicas' gradients while the step's last backward still runs."
    )
    ddp_bucket_size: int | None = option(
        None, "Parameters whose gradients are added up together, with --overlap-grad-reduce.", minimum=1
    )
    no_gradient_accumulation_fusion: bool = option(
        False,
        "Let autograd make each weight's gradient, in the weight's dtype, and add it to the gradient buffer later; "
        "by default linear layers, embedding and logprobs add to the float32 buffer as they compute it.",
    )
    distributed_timeout_minutes: float = option(
        10.0, "A process that the others have waited for so long, because it died or hangs, ends the job.", above=0
    )
    sequence_parallel: bool = option(False, "Shard norms along the sequence; needs tensor parallelism.")

    @property
    def expert_tensor_size(self) -> int:
        """Processes that share each expert."""
        return self.expert_tensor_parallel_size or self.tensor_model_parallel_size

    @property
    def timeout(self) -> timedelta:
        """How long a collective waits for a rank."""
        return timedelta(minutes=self.distributed_timeout_minutes)
