"""Reads the rows of verl's batches and exchanges them between data-parallel ranks.

verl gives each data-parallel rank its own rows, so samples that share a prefix may be on different ranks. The ranks
exchange their rows on the host, every rank sees the rows of the whole mini-batch in one order, and the planner decides
which rank computes which row. Results go back to the ranks that brought the rows.

verl's conventions: ``input_ids`` is a jagged nested tensor of prompts and responses without padding. Outputs have the
same lengths; position t holds the logprob of token t + 1 (a critic: the value of the state after token t). Masks and
advantages cover the response only, as a nested or a right-padded tensor, except for ``loss_mask`` in supervised
training, which covers the whole row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict
from torch import Tensor

from megatron_dta.core.common.errors import InputError
from megatron_dta.core.model.parallel.mesh import Mesh
from megatron_dta.integrations.rows import Row


def read_rows(data: TensorDict) -> list[Row]:
    """The rows of a mini-batch; raises InputError for rows that are not plain text."""
    input_ids = data["input_ids"]
    if not input_ids.is_nested:
        raise InputError("input_ids must be a nested tensor (data.pad_mode=no_padding)")
    tokens = [row.numpy().astype(np.int64) for row in input_ids.cpu().unbind()]
    _check_positions(data, tokens)
    rows = []
    for index, (token_ids, trained) in enumerate(zip(tokens, _masks(data), strict=True)):
        if len(trained) > len(token_ids):
            raise InputError(f"row {index}: its mask has {len(trained)} entries, but it has {len(token_ids)} tokens")
        mask = np.zeros(len(token_ids), dtype=bool)
        mask[len(token_ids) - len(trained) :] = trained
        mask[0] = False
        rows.append(Row(token_ids, mask))
    return rows


def _check_positions(data: TensorDict, tokens: Sequence[np.ndarray]) -> None:
    if "multi_modal_inputs" in data.keys() and any(data["multi_modal_inputs"]):  # noqa: SIM118
        raise InputError("multi_modal_inputs: images are not supported by the engine megatron_dta")
    positions = data.get("position_ids", None)
    if positions is None:
        return
    for index, (row, token_ids) in enumerate(zip(positions.cpu().unbind(), tokens, strict=True)):
        if row.dim() != 1 or not np.array_equal(row.numpy(), np.arange(len(token_ids))):
            raise InputError(f"row {index}: position_ids must count from 0; other positions are not supported")


def _masks(data: TensorDict) -> list[np.ndarray]:
    """For each row the mask of its last tokens: of the response, or of the whole row in supervised training."""
    mask = data["response_mask"] if "response_mask" in data.keys() else data["loss_mask"]  # noqa: SIM118
    if mask.is_nested:
        return [row.numpy().astype(bool) for row in mask.cpu().unbind()]
    lengths = _response_lengths(data)
    return [row[:length].numpy().astype(bool) for row, length in zip(mask.cpu(), lengths, strict=True)]


def _response_lengths(data: TensorDict) -> list[int]:
    """Lengths of the responses of right-padded masks."""
    responses = data["responses"]
    if responses.is_nested:
        return responses.offsets().diff().tolist()
    return data["attention_mask"][:, -responses.shape[1] :].sum(dim=1).tolist()


class RowTable:
    """The fields of rows on the host, from which any rows can be taken with the batch's common values.

    Fields are copied from the device and split once, because selecting rows of a nested tensor splits it every time.
    """

    def __init__(self, data: TensorDict) -> None:
        self.size = data.batch_size[0]
        self._rows: dict[str, list[Any]] = {}
        self._dense: dict[str, Tensor] = {}
        self._common: dict[str, Any] = {}
        for name in list(data.keys()):
            value = data.get(name)
            if isinstance(value, NonTensorStack):
                self._rows[name] = value.tolist()
            elif isinstance(value, NonTensorData):
                self._common[name] = value.data
            elif value.is_nested:
                self._rows[name] = list(value.cpu().unbind())
            else:
                self._dense[name] = value.cpu()

    def select(self, rows: Sequence[int], device: torch.device) -> TensorDict:
        """The given rows in this order, on ``device``, as verl's engines pass a micro-batch to a loss function."""
        fields: dict[str, Any] = {}
        for name, values in self._rows.items():
            chosen = [values[row] for row in rows]
            if isinstance(values[0], Tensor):
                fields[name] = torch.nested.as_nested_tensor(chosen, layout=torch.jagged).to(device)
            else:
                fields[name] = NonTensorStack(*[NonTensorData(value) for value in chosen])
        for name, value in self._dense.items():
            fields[name] = value[torch.as_tensor(rows)].to(device)
        for name, value in self._common.items():
            fields[name] = NonTensorData(value)
        return TensorDict(fields, batch_size=[len(rows)])

    def merged(self, others: Sequence[RowTable]) -> RowTable:
        """A table of the rows of all ``others`` in their order, with the common values of this one."""
        table = object.__new__(RowTable)
        table.size, table._common = sum(other.size for other in others), self._common
        table._rows = {name: [row for other in others for row in other._rows[name]] for name in self._rows}
        table._dense = {name: torch.cat([other._dense[name] for other in others]) for name in self._dense}
        return table


def gather_tables(table: RowTable, mesh: Mesh) -> RowTable:
    """The tables of every data-parallel rank, joined in rank order."""
    return table if mesh.data_size == 1 else table.merged(mesh.gather_over_data(table))
