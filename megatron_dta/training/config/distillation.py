"""Settings of on-policy distillation from teachers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from megatron_dta.core.config.options import option

teacher_option = partial(option, needs="teacher_load_hf")


@dataclass
class DistillationConfig:
    """Teachers that score the policy's own rollouts (``megatron_dta.training.teachers``)."""

    teacher_load_hf: list[str] | None = option(
        None,
        "Teachers with the policy's vocabulary: Hugging Face checkpoints, FOLDER or NAME=FOLDER, which are loaded on "
        "the policy's mesh, or addresses of megatron-dta teacher, NAME=http://HOST:PORT. A prompt or rollout names its "
        "teacher in the field teacher (default: the first).",
    )
    teacher_kl: str = teacher_option(
        "full-vocabulary",
        "Reverse KL divergence from the teacher: over the whole vocabulary, as a term of the loss, or on the sampled "
        "tokens, subtracted from their advantages.",
        choices=("full-vocabulary", "sampled-tokens"),
    )
    teacher_coef: float = teacher_option(1.0, "Weight of this divergence.", above=0)
    teacher_only: bool = teacher_option(
        False, "Learn from the teacher alone: rewards are reported, and their advantages are 0."
    )

    @property
    def is_used(self) -> bool:
        """Whether there are teachers."""
        return bool(self.teacher_load_hf)


def is_address(teacher: str) -> bool:
    """Whether a teacher is given by the address of its server."""
    return teacher.startswith(("http://", "https://"))
