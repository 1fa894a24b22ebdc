"""Settings of the mesh: tensor, sequence, pipeline and expert parallelism; the remaining dimension is data-parallel."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

from megatron_dta.core.config.options import NO_FLAG, option


@dataclass
class ParallelConfig:
    """Sizes of Megatron's process groups."""

    tensor_model_parallel_size: int = option(1, "Ranks that share each layer.", minimum=1)
    pipeline_model_parallel_size: int = option(1, "Pipeline stages that the layers are divided into.", minimum=1)
    num_virtual_stages_per_pipeline_rank: int = option(
        1, "Model chunks per pipeline rank (interleaved stages).", minimum=1, needs="pipeline_model_parallel_size>1"
    )
    pipeline_model_parallel_layout: str | None = option(
        None,
        "Layers of each stage in Megatron's notation (E embedding, t layer, L loss, | between stages), such as "
        "'Ett|ttt|tttL', or auto for the division with the lowest predicted cost (default: equal numbers).",
        needs="pipeline_model_parallel_size>1",
    )
    context_parallel_size: int = option(
        1,
        "Ranks that divide the tokens of each segment and, inside the attention, its heads: memory and time of a long "
        "path are divided by it.",
        minimum=1,
    )
    expert_model_parallel_size: int = option(
        1, "Ranks over which the experts of a layer are distributed.", minimum=1, needs="num_experts"
    )
    expert_tensor_parallel_size: int | None = option(
        None, "Ranks that share each expert (default: --tensor-model-parallel-size).", minimum=1, needs="num_experts"
    )
    use_distributed_optimizer: bool = option(False, "Shard the optimizer state over the data-parallel ranks.")
    overlap_grad_reduce: bool = option(
        False, "Reduce gradients over the replicas while the last backward of the step is still running."
    )
    ddp_bucket_size: int | None = option(
        None, "Parameters per bucket of gradients that --overlap-grad-reduce reduces together.", minimum=1, flag=NO_FLAG
    )
    no_gradient_accumulation_fusion: bool = option(
        False,
        "Let autograd compute each weight's gradient in the weight's dtype and add it to the gradient buffer "
        "afterwards. By default linear layers, embedding and logprobs accumulate directly into the float32 buffer.",
        flag=NO_FLAG,
    )
    distributed_timeout_minutes: float = option(
        10.0, "Minutes that ranks wait for a rank that died or hangs before the job ends.", above=0
    )
    sequence_parallel: bool = option(
        False, "Shard norms along the sequence; needs tensor parallelism.", needs="tensor_model_parallel_size>1"
    )

    @property
    def expert_tensor_size(self) -> int:
        """Ranks that share each expert."""
        return self.expert_tensor_parallel_size or self.tensor_model_parallel_size

    @property
    def timeout(self) -> timedelta:
        return timedelta(minutes=self.distributed_timeout_minutes)
