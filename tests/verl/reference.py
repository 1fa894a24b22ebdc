"""The reference: every row alone through Megatron's stock model in float64, or through transformers in float32, and
verl's loss function on the whole rows."""

from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor
from verl.workers.config import HFModelConfig

from batches import BATCHES, TEMPERATURE, random_rows
from megatron_dta.core.model.build import build_stock_model
from megatron_dta.core.model.parallel.mesh import initialize_parallel
from megatron_dta.integrations.verl.config import MegatronDtaEngineConfig
from megatron_dta.integrations.verl.settings import train_config
from megatron_dta.training.huggingface.save import hf_weights, load_hf
from worker import head_weights, loss_of, mini_batches


class StockModel:
    """Megatron's ``GPTModel`` in float64."""

    def __init__(self, folder: str, value_head: bool) -> None:
        model = HFModelConfig(path=folder, override_config={"attn_implementation": "sdpa"})
        self.settings = train_config(model, MegatronDtaEngineConfig(dtype="float64"), None)
        device = initialize_parallel(1)
        self.module = build_stock_model(self.settings.model, device)
        load_hf(self.settings, self.module)
        self.head = None
        if value_head:
            # The value head takes the place of the output layer, in the model's own forward.
            self.head = torch.nn.Parameter(head_weights(self.settings.model.hidden_size))
            self.module.post_process = False

    def __call__(self, token_ids: Tensor) -> Tensor:
        """Logits [T, V] or values [T] of one row."""
        length = len(token_ids)
        hidden_from = torch.ones(1, 1, length, length, dtype=torch.bool).triu(1)
        outputs = self.module(token_ids[None], torch.arange(length)[None], hidden_from)
        if self.head is None:
            return outputs[0]
        return outputs[:, 0] @ self.head

    def gradients(self) -> dict[str, Tensor]:
        """Gradients under Hugging Face's names."""
        parameters = list(self.module.parameters())
        weights = [parameter.data for parameter in parameters]
        for parameter in parameters:
            parameter.data = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        exported = hf_weights(self.settings, self.module, self.head is not None).iterate()
        gradients = {name: values.clone() for name, values in exported}
        for parameter, values in zip(parameters, weights, strict=True):
            parameter.data = values
        return gradients if self.head is None else gradients | {"value_head": self.head.grad.clone()}

    def clear(self) -> None:
        """Forget the gradients."""
        self.module.zero_grad()
        if self.head is not None:
            self.head.grad = None


class HuggingFaceModel:
    """transformers' model in float32."""

    def __init__(self, folder: str, value_head: bool) -> None:
        assert not value_head
        self.module = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    def __call__(self, token_ids: Tensor) -> Tensor:
        """Logits [T, V] of one row."""
        return self.module(input_ids=token_ids[None], use_cache=False).logits[0]

    def gradients(self) -> dict[str, Tensor]:
        """Gradients of parameter name."""
        return {name: parameter.grad.clone() for name, parameter in self.module.named_parameters()}

    def clear(self) -> None:
        """Forget the gradients."""
        self.module.zero_grad()


def run_reference(case: dict[str, Any], data_size: int) -> list[dict[str, Any]]:
    """For every mini-batch: gradients, and for every data-parallel rank loss, metrics and outputs of its rows."""
    model = (StockModel if case["dtype"] == "float64" else HuggingFaceModel)(
        case["model"], case.get("value_head", False)
    )
    dtype = getattr(torch, case["dtype"])
    rows, loss = random_rows(case["seed"], case["rows"]), loss_of(case)
    results = []
    for of_ranks in mini_batches(case, data_size):
        model.clear()
        tokens = sum(int(rows[index]["response_mask"].sum()) for indices in of_ranks for index in indices)
        common = {"batch_num_tokens": tokens, "dp_size": data_size, "global_batch_size": case["mini_batch_size"]}
        total, ranks = 0.0, []
        for indices in of_ranks:
            chosen = [rows[index] for index in indices]
            outputs = _outputs(model, chosen, case.get("value_head", False), dtype)
            value, metrics = loss(model_output=dict(outputs), data=BATCHES[case["form"]](chosen, dtype, **common))
            total = total + value / data_size
            rows_of = {name: [row.detach() for row in values.unbind()] for name, values in outputs.items()}
            ranks.append({"loss": float(value), "metrics": metrics, "outputs": rows_of})
        total.backward()
        results.append({"gradients": model.gradients(), "ranks": ranks})
    return results


def _outputs(model: Any, rows: list[dict[str, np.ndarray]], value_head: bool, dtype: torch.dtype) -> dict[str, Tensor]:
    """verl's model outputs; position t holds the logprob of token t + 1."""
    outputs: dict[str, list[Tensor]] = {}
    for row in rows:
        token_ids = torch.from_numpy(np.concatenate([row["prompts"], row["responses"]]))
        computed = model(token_ids)
        if value_head:
            outputs.setdefault("values", []).append(computed)
            continue
        distributions = torch.log_softmax(computed / TEMPERATURE, dim=-1)
        labels = token_ids.roll(-1)
        outputs.setdefault("log_probs", []).append(distributions.gather(1, labels[:, None])[:, 0])
        outputs.setdefault("entropy", []).append(-(distributions.exp() * distributions).sum(-1))
    return {name: torch.nested.as_nested_tensor(values, layout=torch.jagged) for name, values in outputs.items()}
