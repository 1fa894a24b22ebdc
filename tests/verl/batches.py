"""Random batches in the two forms of verl's trainers: nested, and padded on the left and right."""

import numpy as np
import torch
from tensordict import TensorDict
from verl.utils import tensordict_utils
from verl.workers.utils.padding import left_right_2_no_padding

from tiny_model import VOCAB_SIZE

TEMPERATURE = 0.7


def random_rows(seed: int, count: int) -> list[dict[str, np.ndarray]]:
    """Rows that share prompts and parts of responses, with masked tokens inside the responses (tool output)."""
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(0, VOCAB_SIZE, rng.integers(3, 9)) for _ in range(2)]
    turns = [rng.integers(0, VOCAB_SIZE, rng.integers(1, 7)) for _ in range(3)]
    rows = []
    for index in range(count):
        prompt = prompts[rng.integers(len(prompts))]
        parts = [turns[rng.integers(len(turns))] for _ in range(rng.integers(0, 3))]
        response = np.concatenate([*parts, rng.integers(0, VOCAB_SIZE, rng.integers(1, 6))])
        mask = rng.random(len(response)) < 0.8
        mask[-1] = True
        if index == 1:
            mask[:] = False  # a row that nothing is trained of
        floats = {
            name: rng.normal(size=len(response)) * mask
            for name in ("old_log_probs", "ref_log_prob", "advantages", "values", "returns")
        }
        floats["old_log_probs"] = floats["old_log_probs"] * 0.3 - 5 * mask
        floats["ref_log_prob"] = floats["ref_log_prob"] * 0.3 - 5 * mask
        rows.append({"prompts": prompt, "responses": response, "response_mask": mask, **floats})
    return rows


def nested_batch(rows: list[dict[str, np.ndarray]], dtype: torch.dtype, **common: object) -> TensorDict:
    """The rows as verl's newer trainer passes them."""
    fields = {
        name: _nested([torch.from_numpy(row[name]) for row in rows], dtype if name not in _INTEGERS else torch.int64)
        for name in rows[0]
    }
    # A teacher's logprobs cover the whole row, with one column for each of the teacher's choices.
    teacher = [np.cos(np.arange(len(row["prompts"]) + len(row["responses"]))) - 4 for row in rows]
    fields["teacher_logprobs"] = _nested([torch.from_numpy(values)[:, None] for values in teacher], dtype)
    sequences = [np.concatenate([row["prompts"], row["responses"]]) for row in rows]
    fields["input_ids"] = _nested([torch.from_numpy(ids) for ids in sequences], torch.int64)
    fields["position_ids"] = _nested([torch.arange(len(ids)) for ids in sequences], torch.int64)
    fields["loss_mask"] = fields["response_mask"]
    return tensordict_utils.get_tensordict(fields, {"temperature": TEMPERATURE, **common})


def padded_batch(rows: list[dict[str, np.ndarray]], dtype: torch.dtype, **common: object) -> TensorDict:
    """The rows as verl's older trainer passes them: prompts padded on the left, responses on the right."""
    # verl's trainer pads the rows of all ranks to one width.
    before, behind = 10, 24
    fields = {}
    for name in rows[0]:
        pad = "left" if name == "prompts" else "right"
        kind = torch.int64 if name in _INTEGERS else dtype
        values = [_padded(row[name], before if pad == "left" else behind, pad) for row in rows]
        fields[name] = torch.stack(values).to(kind)
    masks = [{name: np.ones(len(row[name])) for name in ("prompts", "responses")} for row in rows]
    attention = [
        torch.cat([_padded(o["prompts"], before, "left"), _padded(o["responses"], behind, "right")]) for o in masks
    ]
    fields["attention_mask"] = torch.stack(attention).to(torch.int64)
    fields["input_ids"] = torch.cat([fields["prompts"], fields["responses"]], dim=1)
    fields["position_ids"] = (fields["attention_mask"].cumsum(1) - 1).clamp(min=0)
    data = tensordict_utils.get_tensordict(fields, {"temperature": TEMPERATURE, **common})
    return left_right_2_no_padding(data)


_INTEGERS = ("prompts", "responses", "response_mask")
BATCHES = {"nested": nested_batch, "padded": padded_batch}


def _nested(rows: list[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    return torch.nested.as_nested_tensor([row.to(dtype) for row in rows], layout=torch.jagged)


def _padded(values: np.ndarray, width: int, side: str) -> torch.Tensor:
    missing = (width - len(values), 0) if side == "left" else (0, width - len(values))
    return torch.nn.functional.pad(torch.from_numpy(values.astype(np.float64)), missing)
