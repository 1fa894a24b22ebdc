"""What of the kernels the engine and the samplers name; only the model layer imports the kernels."""

from dta_kernels.logprobs.linear import RowChunk
from dta_kernels.logprobs.logit_chunks import Head
from dta_kernels.logprobs.reverse_kl import TeacherRows
from dta_kernels.tree_attention.plan import AttentionShape
from dta_kernels.tree_attention.reference import accumulation_dtype
from dta_kernels.upload import upload

__all__ = ["AttentionShape", "Head", "RowChunk", "TeacherRows", "accumulation_dtype", "upload"]
