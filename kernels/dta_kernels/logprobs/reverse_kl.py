"""Computes the reverse KL divergence from a teacher over the whole vocabulary, one chunk of logits at a time.

    KL(student || teacher) = sum over tokens v of p(v) (log p(v) - log q(v))

p is the student's distribution of a row, q the teacher's at the same row; both are softmaxes of ``hidden @ weight.T /
temperature`` with hidden states and output weights of their own. The teacher is a constant. The derivative with respect
to the student's logit of v, before the temperature, is p(v) (log p(v) - log q(v) - KL) / temperature.

As in ``linear``, the logits of all rows would be the largest tensors of a step, so both passes process chunks of rows
and the backward computes the logits again. With a divided vocabulary every rank has all rows and its columns of both
weights: the same tokens of both. One all-reduce combines the maxima, one the masses and one the moments.

Legend: R rows, V vocabulary (of the rank, if it is divided), C hidden size of the student, D of the teacher.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as distributed
from torch import Tensor

from dta_kernels.layers.weight_gradients import add_weight_gradient, gradient_placeholder
from dta_kernels.logprobs.linear import VocabularyShard
from dta_kernels.logprobs.logit_chunks import Head, tempered_logits
from dta_kernels.tree_attention.reference import accumulation_dtype


class TeacherRows(NamedTuple):
    """The teacher at the rows of a call.

    Attributes:
        hidden: [R, D], its hidden states after the final norm.
        head: its output weight [V, D], the same tokens as the student's.
    """

    hidden: Tensor
    head: Head


class ReverseKLSettings(NamedTuple):
    """How rows are processed.

    Attributes:
        rows_per_chunk: rows of logits alive at once.
        temperature: divides the logits of both.
        shard: the vocabulary is divided among ranks; None: it is not.
        weight_grad: buffer [V, C] to which the gradient of the output weight is added; None: autograd gets it.
        in_float32: logits of 16-bit inputs are float32 instead of being rounded to 16 bits.
    """

    rows_per_chunk: int
    temperature: float = 1.0
    shard: VocabularyShard | None = None
    weight_grad: Tensor | None = None
    in_float32: bool = False


class _ReverseKL(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden_RC: Tensor, weight_VC: Tensor, teacher: TeacherRows, settings: ReverseKLSettings) -> Tensor:
        dtype, num_rows = accumulation_dtype(hidden_RC.dtype), hidden_RC.shape[0]
        heads = ((hidden_RC, Head(weight_VC, settings.in_float32)), (teacher.hidden, teacher.head))
        # The log-sum-exp of both distributions, [2, R]; a rank without tokens has no mass.
        largest_2R = hidden_RC.new_full((2, num_rows), torch.finfo(dtype).min / 2, dtype=dtype)
        mass_2R = torch.zeros_like(largest_2R)
        chunks = _chunks(num_rows, settings.rows_per_chunk) if weight_VC.shape[0] else ()
        for rows in chunks:
            for which, (hidden, head) in enumerate(heads):
                logits_BV = tempered_logits(hidden[rows], head, settings.temperature).to(dtype)
                largest_2R[which, rows] = logits_BV.amax(-1)
                mass_2R[which, rows] = logits_BV.sub_(largest_2R[which, rows, None]).exp_().sum(-1)
        if settings.shard is not None and num_rows:
            own_2R = largest_2R.clone()
            distributed.all_reduce(largest_2R, distributed.ReduceOp.MAX, settings.shard.group)
            mass_2R *= (own_2R - largest_2R).exp()
            distributed.all_reduce(mass_2R, distributed.ReduceOp.SUM, settings.shard.group)
        # The maximum is subtracted first: that difference is exact, and small terms keep their digits.
        log_mass_2R = mass_2R.log()
        kl_R = hidden_RC.new_zeros(num_rows, dtype=dtype)
        for rows in chunks:
            p_BV, gap_BV = _gap(rows, heads, largest_2R, log_mass_2R, settings)
            kl_R[rows] = p_BV.mul_(gap_BV).sum(-1)
        if settings.shard is not None and num_rows:
            distributed.all_reduce(kl_R, distributed.ReduceOp.SUM, settings.shard.group)
        saved = (teacher.hidden, teacher.head.weight, largest_2R, log_mass_2R, kl_R)
        ctx.save_for_backward(hidden_RC, weight_VC, *saved)
        ctx.settings, ctx.teacher_in_float32 = settings, teacher.head.in_float32
        return kl_R

    @staticmethod
    def backward(ctx, grad_kl_R: Tensor):
        hidden_RC, weight_VC, teacher_RD, teacher_VD, largest_2R, log_mass_2R, kl_R = ctx.saved_tensors
        settings: ReverseKLSettings = ctx.settings
        head, teacher_head = Head(weight_VC, settings.in_float32), Head(teacher_VD, ctx.teacher_in_float32)
        heads = ((hidden_RC, head), (teacher_RD, teacher_head))
        needs_weight, sum_VC, buffer_VC = ctx.needs_input_grad[1], settings.weight_grad, settings.weight_grad
        if needs_weight and buffer_VC is None:
            sum_VC = torch.zeros_like(weight_VC, dtype=kl_R.dtype)
        has_tokens = weight_VC.shape[0] > 0
        grad_hidden_RC = torch.empty_like(hidden_RC) if has_tokens else torch.zeros_like(hidden_RC)
        for rows in _chunks(hidden_RC.shape[0], settings.rows_per_chunk) if has_tokens else ():
            p_BV, gap_BV = _gap(rows, heads, largest_2R, log_mass_2R, settings)
            factor_B = grad_kl_R[rows].to(kl_R.dtype) / settings.temperature
            grad_BV = p_BV.mul_(gap_BV.sub_(kl_R[rows, None])).mul_(factor_B[:, None]).to(hidden_RC.dtype)
            grad_hidden_RC[rows] = grad_BV @ weight_VC
            if sum_VC is not None:
                add_weight_gradient(sum_VC, grad_BV, hidden_RC[rows])
        grad_weight_VC = None
        if needs_weight:
            grad_weight_VC = sum_VC.to(weight_VC.dtype) if buffer_VC is None else gradient_placeholder(weight_VC)
        return grad_hidden_RC, grad_weight_VC, None, None


def linear_reverse_kl(
    hidden_RC: Tensor, weight_VC: Tensor, teacher: TeacherRows, settings: ReverseKLSettings
) -> Tensor:
    """KL(student || teacher) of every row, [R] in float32 (float64 for float64 inputs).

    Differentiable in ``hidden_RC`` and ``weight_VC``; with a divided vocabulary the gradient of ``hidden_RC`` is the
    rank's summand.
    """
    return _ReverseKL.apply(hidden_RC, weight_VC, teacher, settings)


def reverse_kl_reference(logits_RV: Tensor, teacher_logits_RV: Tensor, temperature: float = 1.0) -> Tensor:
    """The same from whole logits, by autograd."""
    log_p, log_q = (torch.log_softmax(x / temperature, -1) for x in (logits_RV, teacher_logits_RV))
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def _chunks(num_rows: int, size: int) -> list[slice]:
    return [slice(begin, min(begin + size, num_rows)) for begin in range(0, num_rows, size)]


def _gap(
    rows: slice, heads: tuple[tuple[Tensor, Head], tuple[Tensor, Head]], largest_2R: Tensor, log_mass_2R: Tensor,
    settings: ReverseKLSettings,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """p and log p - log q of a chunk, [B, V] each."""
    logprobs = []
    for which, (hidden, head) in enumerate(heads):
        logits_BV = tempered_logits(hidden[rows], head, settings.temperature).to(largest_2R.dtype)
        logprobs.append(logits_BV.sub_(largest_2R[which, rows, None]).sub_(log_mass_2R[which, rows, None]))
    return logprobs[0].exp(), logprobs[0].sub_(logprobs[1])
