"""TRL's tree rows, padding-free rows and our engine give the gradient of the float32 reference of ``benchmarks/peers``.

The varlen attention is a stand-in of this test, PyTorch's attention segment by segment; FlashAttention needs a GPU.
"""

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor

from megatron_dta.core.model.parallel.mesh import destroy_parallel
from peers.engine import EngineStep
from peers.trl_rows import TrlStep, trl_folder
from peers.workload import Sequence, counts, distance, model_config, reference_gradients

CPU = torch.device("cpu")
needs_trl = pytest.mark.skipif(trl_folder() is None, reason="needs TRL: pip install --no-deps 'trl==1.16.*'")


def segment_attention(query: Tensor, key: Tensor, value: Tensor, *lengths: object, **settings: object) -> Tensor:
    """Causal attention of every segment's queries on its keys, of which the last are the queries' own."""
    starts, key_starts = (ends.tolist() for ends in lengths[:2])
    outputs = []
    for i in range(len(starts) - 1):
        part = query[starts[i] : starts[i + 1]].transpose(0, 1)
        keys, values = (x[key_starts[i] : key_starts[i + 1]].transpose(0, 1) for x in (key, value))
        size, total = part.shape[1], keys.shape[1]
        visible = torch.ones(size, total, dtype=torch.bool).tril(total - size)
        scale = settings["softmax_scale"]
        outputs.append(
            F.scaled_dot_product_attention(part, keys, values, attn_mask=visible, scale=scale, enable_gqa=True)
        )
    return torch.cat(outputs, dim=1).transpose(0, 1)


def sequences() -> list[Sequence]:
    """Two groups; in one of them a sequence is the beginning of another, and a turn in the middle is not trained."""
    rng = np.random.default_rng(5)
    start, other = rng.integers(0, 60, 12), rng.integers(0, 60, 9)
    other[0] = start[0] + 1
    middle = np.concatenate([start, rng.integers(0, 60, 8)])
    tokens = [
        np.concatenate([start, rng.integers(0, 60, 7)]),
        middle,
        np.concatenate([middle, rng.integers(0, 60, 11)]),
        *(np.concatenate([other, rng.integers(0, 60, length)]) for length in (5, 6)),
    ]
    rows = []
    for number, ids in enumerate(tokens):
        mask = np.arange(len(ids)) >= 10
        mask[12:13] = False
        rows.append(Sequence(ids, mask, float(rng.normal()), int(number > 2)))
    return rows


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny Qwen3 in float32."""
    folder = tmp_path_factory.mktemp("qwen3")
    torch.manual_seed(7)
    config = transformers.Qwen3Config(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=128, tie_word_embeddings=True,
    )  # fmt: skip
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return folder


@needs_trl
@pytest.mark.parametrize("is_tree", [True, False], ids=["tree", "flat"])
@pytest.mark.parametrize("recomputes", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("budget", [35, 1000])
def test_rows_of_trl_give_the_reference_gradient(model: Path, is_tree: bool, recomputes: bool, budget: int) -> None:
    rows = sequences()
    peer = TrlStep(model, is_tree, segment_attention, torch.float32, CPU)
    peer.checkpoint_layers(recomputes)
    packed = peer.rows(rows, budget)
    loss = peer.step(packed, rows)
    computed, counted = sum(len(row["input_ids"]) for row in packed), counts(rows, model_config(model, torch.float32))
    if budget == 1000:
        # TRL forks one token before the sequences differ, so each further branch costs a token.
        assert computed == (counted["unique_tokens"] + 3 if is_tree else counted["tokens"])
    else:
        assert len(packed) > 1
    _compare(model, rows, dict(peer.model.named_parameters()), loss)


def _compare(model: Path, rows: list[Sequence], parameters: dict[str, Tensor], loss: float) -> None:
    reference = reference_gradients(model, rows, CPU)
    assert distance({name: p.grad for name, p in parameters.items()}.items(), reference) < 1e-5
    assert np.isfinite(loss)


@pytest.mark.parametrize("mode", ["dta", "dense"])
def test_our_engine_gives_the_reference_gradient(model: Path, mode: str) -> None:
    rows = sequences()
    try:
        ours = EngineStep(model, torch.float32)
        loss = ours.step(ours.plan(rows, mode))
        assert distance(ours.gradients().items(), reference_gradients(model, rows, CPU)) < 1e-5
        assert ours.step(ours.plan(rows, mode)) == loss  # the weights are still there
    finally:
        destroy_parallel()
