"""States of sequences that are being decoded: one for each sequence, after the tokens that it has computed.

A pass appends tokens to some sequences. Each is a run whose entry is the sequence's state, and whose exit replaces it;
so prefill, decoding and prefill after an interruption are one operation. On the kernels, a pass of one token for each
sequence changes the states in place (``SteppedStates``), as captured passes do. Nothing here is differentiated.

Legend: n new tokens of the pass, R sequences (rows) of it, C channels and W width of the short convolution.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from dta_kernels.recurrence.contract import Recurrence, Runs
from dta_kernels.recurrence.short_convolution import PathLayout, short_convolution
from dta_kernels.tree_attention.reference import accumulation_dtype
from dta_kernels.upload import upload
from megatron_dta.core.model.hybrid.path_states import RecurrentShape


class DecodeStates:
    """States and last rows of ``num_slots`` sequences in each of a rank's layers with a recurrence.

    Attributes:
        addresses: int64 [layers, 2] on the device, where each layer's states and rows begin; ``grow`` changes them.
        layer_rows: the row of ``addresses`` by layer number.
    """

    def __init__(self, layers: Mapping[int, RecurrentShape], dtype: torch.dtype, device: torch.device) -> None:
        self.shapes, self.device, self.num_slots = dict(layers), device, 0
        states = {number: (0, *shape.state) for number, shape in self.shapes.items()}
        rows = {number: (0, shape.width - 1, shape.channels) for number, shape in self.shapes.items()}
        self.states = {
            n: torch.empty(size, dtype=accumulation_dtype(dtype), device=device) for n, size in states.items()
        }
        self.rows = {number: torch.empty(size, dtype=dtype, device=device) for number, size in rows.items()}
        self.layer_rows = {number: row for row, number in enumerate(layers)}
        self.addresses = torch.zeros(len(self.layer_rows), 2, dtype=torch.int64, device=device)

    def grow(self, num_slots: int) -> None:
        """Enlarge to ``num_slots`` and keep the contents."""
        for of_layers in (self.states, self.rows):
            for number, tensor in of_layers.items():
                larger = tensor.new_zeros(num_slots, *tensor.shape[1:])
                larger[: len(tensor)] = tensor
                of_layers[number] = larger
        self.num_slots = num_slots
        addresses = [[self.states[number].data_ptr(), self.rows[number].data_ptr()] for number in self.layer_rows]
        self.addresses = torch.tensor(addresses, dtype=torch.int64, device=self.device).view_as(self.addresses)

    def copy(self, source: int, target: int) -> None:
        """Copy the state of one slot to another."""
        for tensor in (*self.states.values(), *self.rows.values()):
            tensor[target] = tensor[source]


class SteppedStates:
    """``PathStates`` of a pass that appends one token to each sequence, by the kernels.

    Args:
        addresses, layer_rows: those of ``DecodeStates``; a captured pass has a copy at an address of its own.
        slots: int64 [n], slots of the rows; -1 for rows whose state must not change.
        positions: int64 [n], tokens before each row's new one.
    """

    def __init__(self, addresses: Tensor, layer_rows: Mapping[int, int], slots: Tensor, positions: Tensor) -> None:
        self._addresses, self._layer_rows, self._slots, self._positions = addresses, layer_rows, slots, positions

    def convolve(self, layer_number: int, rows_NC: Tensor, weight_CW: Tensor, bias_C: Tensor | None = None) -> Tensor:
        # Imported here because passes without the kernels do not need Triton.
        from dta_kernels.recurrence.decode_kernels import convolution_step

        address = self._addresses[self._layer_rows[layer_number]]
        return convolution_step(rows_NC, weight_CW, address, self._slots, self._positions, bias_C)

    def recur(self, layer_number: int, recurrence: Recurrence, inputs: Sequence[Tensor]) -> Tensor:
        from dta_kernels.recurrence.decode_kernels import recurrence_step

        address = self._addresses[self._layer_rows[layer_number]]
        return recurrence_step(tuple(inputs), address, self._slots, self._positions)


class PassStates:
    """``PathStates`` of one pass, which appends ``counts[i]`` tokens to the ``starts[i]`` of the sequence of slot i.

    The tokens are those of the first row, then those of the second, and so on. The states of ``tentative`` rows are
    read but not written: it is not known yet which of their tokens are kept (``commit``).
    """

    def __init__(
        self,
        owner: DecodeStates,
        slots: Sequence[int],
        starts: Sequence[int],
        counts: Sequence[int],
        uses_kernels: bool,
        tentative: Sequence[int] = (),
    ) -> None:
        self._owner, self._uses_kernels = owner, uses_kernels
        self._runs = Runs.of_lengths([int(count) for count in counts], owner.device)
        self._layouts: dict[int, PathLayout] = {}
        self._tentative, ends = list(tentative), np.cumsum(counts)
        written = np.setdiff1d(np.arange(len(counts)), self._tentative)
        self._num_kept = [int(counts[row]) for row in self._tentative]
        kept = np.concatenate(
            [np.arange(0), *(np.arange(ends[row] - counts[row], ends[row]) for row in self._tentative)]
        )
        arrays = [np.asarray(slots), np.asarray(starts) > 0, written, kept]
        self._slots, begun, self._written, kept_rows = upload(arrays, owner.device)
        # A sequence without computed tokens begins with zeros; the slot may hold other values.
        self._begun, self._kept = begun.bool(), kept_rows if self._tentative else None
        # By layer: inputs of the tentative rows' tokens.
        self._filtered: dict[int, Tensor] = {}
        self._recurred: dict[int, tuple[Recurrence, tuple[Tensor, ...]]] = {}

    def commit(self, counts: Sequence[int]) -> None:
        """Write the states of the tentative rows, of whose tokens the first ``counts[i]`` are kept."""
        rows = [i for i, count in enumerate(counts) if count]
        if not rows:
            return
        owner, offsets = self._owner, np.concatenate([[0], np.cumsum(self._num_kept)])
        tokens = np.concatenate([np.arange(offsets[i], offsets[i] + counts[i]) for i in rows])
        sequences, chosen = upload([np.asarray([self._tentative[i] for i in rows]), tokens], owner.device)
        slots, begun = self._slots[sequences], self._begun[sequences]
        runs = Runs.of_lengths([counts[i] for i in rows], owner.device)
        for layer, filtered in self._filtered.items():
            before = _begun_or_zero(owner.rows[layer][slots], begun)
            for row, i in enumerate(rows):
                path = torch.cat([before[row], filtered[offsets[i] : offsets[i] + counts[i]].to(before.dtype)])
                owner.rows[layer][slots[row]] = path[len(path) - before.shape[1] :]
        for layer, (recurrence, inputs) in self._recurred.items():
            entry = _begun_or_zero(owner.states[layer][slots], begun)
            owner.states[layer][slots] = recurrence(tuple(tokens[chosen] for tokens in inputs), entry, runs)[1]
        self._filtered, self._recurred = {}, {}

    def convolve(self, layer_number: int, rows_NC: Tensor, weight_CW: Tensor, bias_C: Tensor | None = None) -> Tensor:
        owner, width = self._owner, weight_CW.shape[1]
        before = owner.rows[layer_number][self._slots]
        before = _begun_or_zero(before, self._begun).flatten(0, 1)
        layout = self._layout(width)
        last = layout.token_row[self._runs.on_device[1:] - 1].unsqueeze(1)
        kept = layout.source[last + torch.arange(2 - width, 1, device=owner.device)]
        new = torch.cat([rows_NC, before])[kept].to(rows_NC.dtype)
        owner.rows[layer_number][self._slots[self._written]] = new[self._written]
        if self._kept is not None:
            self._filtered[layer_number] = rows_NC[self._kept]
        return short_convolution(rows_NC, before, weight_CW, layout, bias_C)

    def recur(self, layer_number: int, recurrence: Recurrence, inputs: Sequence[Tensor]) -> Tensor:
        states = self._owner.states[layer_number]
        entry = states[self._slots]
        output, exits = recurrence(tuple(inputs), _begun_or_zero(entry, self._begun), self._runs)
        states[self._slots[self._written]] = exits[self._written]
        if self._kept is not None:
            self._recurred[layer_number] = recurrence, tuple(tokens[self._kept] for tokens in inputs)
        return output

    def _layout(self, width: int) -> PathLayout:
        if width not in self._layouts:
            offsets = np.asarray(self._runs.offsets)
            counts, before = np.diff(offsets), width - 1
            run = np.repeat(np.arange(len(counts)), counts)
            token_row = np.arange(offsets[-1]) + before * (run + 1)
            source = np.empty(offsets[-1] + before * len(counts), np.int64)
            outside = np.ones(len(source), bool)
            outside[token_row] = False
            source[token_row], source[outside] = np.arange(offsets[-1]), offsets[-1] + np.arange(before * len(counts))
            arrays = (source, token_row, offsets[:-1], np.repeat(offsets[1:], counts))
            self._layouts[width] = PathLayout(*upload(arrays, self._owner.device), self._uses_kernels)
        return self._layouts[width]


def _begun_or_zero(states: Tensor, begun: Tensor) -> Tensor:
    """``states`` [R, ...] with zeros for the rows that have not begun."""
    return torch.where(begun.view(-1, *(1 for _ in states.shape[1:])), states, torch.zeros_like(states))
