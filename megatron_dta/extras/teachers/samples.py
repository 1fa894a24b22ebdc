"""What a teacher computes for samples, in this process, and the samples and results as messages to a teacher elsewhere.

request   token_ids int32 [all tokens], lengths int64 [samples], loss_mask bool [all tokens]
logprobs  float32 or float64 [P], of the trained tokens in order
rows      row int64 [P], the row of each trained token; states [R, D], hidden states of the rows as bytes
head      [V, D], the output weight as bytes

Both sides check what they get. A reply to a request also has ``reply_to``, the digest of the teacher's output weight
and the request, so that the reply to another request, or of another teacher at the same address, is not taken.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from megatron_dta.common.http.replies import field_of, shown
from megatron_dta.core.planning.step.sample import TrainingSample

_TORCH_DTYPES = {"torch.float32": torch.float32, "torch.float64": torch.float64, "torch.bfloat16": torch.bfloat16}
_OTHER_BYTES = 1 << 16
# A softmax may round a probability of 1 to a little more.
_LARGEST_LOGPROB, _SMALLEST_LOGPROB = 1e-3, -1e5


@dataclass(frozen=True)
class TeacherFacts:
    """What a served teacher says about itself.

    Attributes:
        dtype: of its hidden states and its output weight.
        head_digest: ``digest`` of the bytes of its output weight.
    """

    vocab_size: int
    hidden_size: int
    dtype: str
    fp32_lm_head: bool
    head_digest: str

    @classmethod
    def read(cls, reply: Any) -> TeacherFacts:
        """Those in a JSON value; ``ValueError`` or ``TransientFailureError`` names what is wrong."""
        kinds = {"vocab_size": int, "hidden_size": int, "dtype": str, "head_digest": str}
        fields = {name: field_of(reply, name, kind=kind) for name, kind in kinds.items()}
        flag = field_of(reply, "fp32_lm_head")
        sizes = (fields["vocab_size"], fields["hidden_size"])
        if type(flag) is not bool or fields["dtype"] not in _TORCH_DTYPES or not all(0 < s < 2**31 for s in sizes):
            raise ValueError(f"the reply describes no teacher: {shown(reply)}")
        return cls(**fields, fp32_lm_head=flag)

    @property
    def row_bytes(self) -> int:
        """Bytes of a hidden state, and of a row of the output weight."""
        return self.hidden_size * _TORCH_DTYPES[self.dtype].itemsize

    @property
    def most_head_bytes(self) -> int:
        """Longest message with the output weight."""
        return self.vocab_size * self.row_bytes + _OTHER_BYTES

    def most_reply_bytes(self, samples: Sequence[TrainingSample], kind: str) -> int:
        """Longest reply for ``samples``: a row has a state, and there are at most as many rows as tokens."""
        state = self.row_bytes if kind == "rows" else 0
        return sum(8 * sample.num_trained + state * len(sample.token_ids) for sample in samples) + _OTHER_BYTES

    def read_head(self, arrays: Mapping[str, np.ndarray]) -> torch.Tensor:
        """The output weight of a message; ``ValueError`` if it is not this teacher's."""
        (values,) = _arrays(arrays, {"head": (np.uint8, 2)})
        if values.shape != (self.vocab_size, self.row_bytes):
            raise ValueError(f"head: has the shape {values.shape}, not {(self.vocab_size, self.row_bytes)}")
        if digest(values.reshape(-1).data) != self.head_digest:
            raise ValueError("head: is not the output weight that the teacher announced")
        return self._finite(values, "head")

    def read_rows(
        self, arrays: Mapping[str, np.ndarray], samples: Sequence[TrainingSample]
    ) -> tuple[np.ndarray, torch.Tensor]:
        """The rows and states of a reply; ``ValueError`` if they cannot be those of ``samples``."""
        row, states = _arrays(arrays, {"row": (np.int64, 1), "states": (np.uint8, 2)})
        count, tokens = sum(s.num_trained for s in samples), sum(len(s.token_ids) for s in samples)
        if len(row) != count:
            raise ValueError(f"row: has {len(row)} values, and the samples have {count} trained tokens")
        if states.shape[1] != self.row_bytes or not 1 <= len(states) <= tokens:
            raise ValueError(f"states: has the shape {states.shape}, not (1 to {tokens}, {self.row_bytes})")
        if row.min() < 0 or row.max() >= len(states):
            raise ValueError(f"row: must be in [0, {len(states)}), got {int(row.min())} to {int(row.max())}")
        return row, self._finite(states, "states")

    def _finite(self, values: np.ndarray, name: str) -> torch.Tensor:
        tensor = tensor_of(values, self.dtype)
        if not bool(torch.isfinite(tensor).all()):
            raise ValueError(f"{name}: must be finite")
        return tensor


def read_logprobs(arrays: Mapping[str, np.ndarray], samples: Sequence[TrainingSample]) -> list[np.ndarray]:
    """Those of a reply, [T] for each sample, 0 where it is not trained; ``ValueError`` if they cannot be such."""
    double = getattr(arrays.get("logprobs"), "dtype", None) == np.float64
    (values,) = _arrays(arrays, {"logprobs": (np.float64 if double else np.float32, 1)})
    count = sum(sample.num_trained for sample in samples)
    if len(values) != count:
        raise ValueError(f"logprobs: has {len(values)} values, and the samples have {count} trained tokens")
    # Written so that NaN is refused, too.
    wrong = values[~((values >= _SMALLEST_LOGPROB) & (values <= _LARGEST_LOGPROB))]
    if len(wrong):
        raise ValueError(f"logprobs: {wrong[0]:g} is not a logprob")
    logprobs, at = [], 0
    for sample in samples:
        sample_logprobs = np.zeros(len(sample.token_ids), values.dtype)
        sample_logprobs[np.asarray(sample.loss_mask, bool)] = values[at : at + sample.num_trained]
        logprobs.append(sample_logprobs)
        at += sample.num_trained
    return logprobs


def _arrays(arrays: Mapping[str, np.ndarray], forms: Mapping[str, tuple[Any, int]]) -> list[np.ndarray]:
    """The arrays of these names, dtypes and numbers of dimensions, and no others; else ``ValueError``."""
    if arrays.keys() != forms.keys():
        raise ValueError(f"the message must have the arrays {', '.join(forms)}, got {shown(sorted(arrays))}")
    for name, (dtype, dimensions) in forms.items():
        if arrays[name].dtype != dtype or arrays[name].ndim != dimensions:
            raise ValueError(f"{name}: must be an array [{', '.join(['..'] * dimensions)}] of {np.dtype(dtype)}")
    return [arrays[name] for name in forms]


def digest(*parts: bytes | memoryview | str) -> str:
    """Identifies contents: 32 hexadecimal digits."""
    state = hashlib.blake2b(digest_size=16)
    for part in parts:
        state.update(part.encode() + b"\0" if isinstance(part, str) else part)
    return state.hexdigest()


def digest_array(text: str) -> np.ndarray:
    """A digest as an array of a message, uint8 [16]."""
    return np.frombuffer(bytes.fromhex(text), np.uint8)


def pack_samples(samples: Sequence[TrainingSample]) -> dict[str, np.ndarray]:
    """The arrays of a request."""
    return {
        "token_ids": np.concatenate([sample.token_ids for sample in samples]).astype(np.int32),
        "lengths": np.array([len(sample.token_ids) for sample in samples], np.int64),
        "loss_mask": np.concatenate([sample.loss_mask for sample in samples]).astype(bool),
    }


def unpack_samples(arrays: Mapping[str, np.ndarray], vocab_size: int, longest: int) -> list[TrainingSample]:
    """The samples of a request; ``ValueError`` says what is wrong."""
    forms = {"token_ids": (np.int32, 1), "lengths": (np.int64, 1), "loss_mask": (np.bool_, 1)}
    tokens, lengths, mask = _arrays(arrays, forms)
    if not len(lengths) or lengths.min() < 1 or lengths.max() > longest or lengths.sum() != len(tokens):
        raise ValueError(f"lengths: must be 1 to {longest} and add up to the {len(tokens)} tokens")
    if len(mask) != len(tokens) or tokens.min() < 0 or tokens.max() >= vocab_size:
        raise ValueError(f"token_ids: must be in [0, {vocab_size}), and loss_mask as long")
    cuts = np.cumsum(lengths)[:-1]
    samples = []
    for token_ids, sample_mask in zip(np.split(tokens, cuts), np.split(mask, cuts), strict=True):
        if sample_mask[0] or not sample_mask.any():
            raise ValueError("loss_mask: must be false at the first token of a sample and true at another one")
        samples.append(TrainingSample(token_ids.copy(), sample_mask.copy()))
    return samples


def tensor_bytes(tensor: torch.Tensor) -> tuple[np.ndarray, str]:
    """A matrix as bytes, uint8 [rows, bytes], and the name of its dtype."""
    matrix = tensor.detach().cpu().contiguous()
    width = matrix.shape[1] * matrix.element_size()
    return matrix.view(torch.uint8).numpy().reshape(len(matrix), width), str(matrix.dtype)


def tensor_of(values: np.ndarray, dtype: str) -> torch.Tensor:
    """The matrix that ``tensor_bytes`` gave; ``ValueError`` if it is none."""
    if dtype not in _TORCH_DTYPES or values.dtype != np.uint8 or values.ndim != 2:
        raise ValueError("the message has no matrix of floats")
    return torch.from_numpy(values.copy()).view(_TORCH_DTYPES[dtype])
