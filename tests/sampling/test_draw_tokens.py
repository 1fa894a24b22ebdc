"""The kernels that draw tokens against their PyTorch twin, and against the sampler's own chain of operations."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from conftest import seed_all
from dta_kernels.logprobs.draw_tokens import draw_tokens, draw_tokens_reference
from megatron_dta.sampling.in_process.next_token import next_tokens
from megatron_dta.sampling.params import SamplingParams
from triton_device import DEVICE, interpreter

pytestmark = interpreter

# Around the kernels' block of 2,048, and one token.
SIZES = (1, 7, 2047, 2048, 2049, 6500)


def random_rows(
    rng: np.random.Generator, count: int, size: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits from flat to steep, with equals (16 bits have many), and noise with both ends of its range."""
    steepness = 10.0 ** rng.uniform(-1, 1, (count, 1))
    logits = torch.from_numpy(rng.normal(size=(count, size)) * steepness).to(DEVICE, dtype)
    noise = rng.random(count)
    noise[:2] = 0.0, 1 - 2.0**-52
    return logits, torch.from_numpy(noise).to(DEVICE)


@pytest.mark.parametrize(
    ("dtype", "temperature"),
    [
        *((torch.float32, temperature) for temperature in (0.0, 0.6, 1.0)),
        *((torch.bfloat16, temperature) for temperature in (0.0, 0.6)),
        (torch.float16, 1.0),
    ],
)
def test_kernels_equal_their_twin(dtype: torch.dtype, temperature: float):
    rng = seed_all(int(10 * temperature) + dtype.itemsize)
    same = torch.arange(9, device=DEVICE) != 1  # the sums' last bits decide that draw
    for size in SIZES:
        logits, noise = random_rows(rng, 9, size, dtype)
        tokens, logprobs = draw_tokens(logits, noise, temperature)
        expected, their_logprobs = draw_tokens_reference(logits, noise, temperature)
        assert torch.equal(tokens[same], expected[same]), (size, noise)
        assert (logprobs - their_logprobs)[same].abs().max() <= 1e-6
        # Tokens that may not be drawn keep their part of the distribution.
        for num_drawn in {max(1, size - 3), (size + 1) // 2}:
            tokens, logprobs = draw_tokens(logits, noise, temperature, num_drawn)
            expected, their_logprobs = draw_tokens_reference(logits, noise, temperature, num_drawn)
            assert torch.equal(tokens[same], expected[same]), (size, num_drawn, noise)
            assert tokens.max() < num_drawn
            full = torch.log_softmax(logits.double() / (temperature or 1.0), -1).gather(1, tokens[:, None]).squeeze(1)
            assert (logprobs - full).abs().max() <= (2e-5 if temperature == 0.6 else 4e-6)
            assert (logprobs - their_logprobs)[same].abs().max() <= 1e-6


def test_a_row_does_not_depend_on_the_others_or_on_where_it_lies():
    rng = seed_all(4)
    logits, noise = random_rows(rng, 11, 5000, torch.float32)
    wide = torch.full((11, 5011), float("nan"), device=DEVICE)
    wide[:, :5000] = logits
    together = draw_tokens(wide[:, :5000], noise, 1.0)
    for i in range(11):
        alone = draw_tokens(logits[i : i + 1], noise[i : i + 1], 1.0)
        assert [part[0].item() for part in alone] == [part[i].item() for part in together]


def test_every_token_is_drawn_as_often_as_its_probability_says():
    """The numbers i / 200 give each token its share of them to within one, across blocks."""
    rng, count = seed_all(5), 200
    logits = torch.full((1, 4500), float("-inf"))
    columns = np.sort(rng.choice(4500, 12, replace=False))
    logits[0, columns] = torch.from_numpy(rng.normal(size=12)).float()
    noise = (torch.arange(count, dtype=torch.float64) / count).to(DEVICE)
    tokens, _ = draw_tokens(logits.to(DEVICE).expand(count, -1), noise, 1.0)
    counts = np.bincount(tokens.cpu().numpy(), minlength=4500)
    expected = count * torch.softmax(logits[0].double(), 0).numpy()
    assert (np.abs(counts - expected) <= 1).all()
    assert counts.sum() == count


def test_tokens_without_probability_are_never_drawn():
    logits = torch.full((4, 4100), float("-inf"), device=DEVICE)
    logits[:, 2100] = 3.0
    logits[2:, 7] = 2.0
    noise = torch.tensor([0.0, 1 - 2.0**-52, 0.0, 1 - 2.0**-52], dtype=torch.float64, device=DEVICE)
    tokens, logprobs = draw_tokens(logits, noise, 1.0)
    assert tokens.tolist() == [2100, 2100, 7, 2100]
    assert logprobs[:2].tolist() == [0.0, 0.0]
    assert math.isclose(logprobs[2].exp() + logprobs[3].exp(), 1, rel_tol=1e-6)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's numpy
def test_what_is_not_finite_is_seen_in_the_logprob():
    logits = torch.randn(4, 4100, device=DEVICE)
    logits[0, 4099], logits[1, 3], logits[2] = float("nan"), float("inf"), float("-inf")
    for temperature in (0.0, 1.0):
        tokens, logprobs = draw_tokens(logits, torch.full((4,), 0.5, dtype=torch.float64, device=DEVICE), temperature)
        assert torch.isfinite(logprobs).tolist() == [False, False, False, True]
        assert ((tokens >= 0) & (tokens < 4100)).all()


class _Head:
    """As much of a model as ``next_tokens`` asks for."""

    def __init__(self, size: int) -> None:
        self.true_vocab_size, self.vocabulary_shard = size, None
        self.weight = torch.randn(size, 8, device=DEVICE)
        self.config = SimpleNamespace(batch_invariant_mode=False)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden @ self.weight.t()


@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.7, 1.0), (0.0, 1.0), (0.0, 0.5), (1.0, 0.8)])
def test_the_sampler_gives_the_same_with_kernels(temperature: float, top_p: float):
    rng = seed_all(6)
    head, hidden = _Head(2500), torch.from_numpy(rng.normal(size=(40, 8))).float().to(DEVICE)
    noise = torch.from_numpy(rng.random(40)).to(DEVICE)
    params = SamplingParams(1, eos_id=-1, temperature=temperature, top_p=top_p)
    tokens, logprobs = next_tokens(head, hidden, noise, params, kernels=True)
    expected, their_logprobs = next_tokens(head, hidden, noise, params)
    assert tokens.tolist() == expected.tolist()
    assert (logprobs - their_logprobs).abs().max() <= 2e-6


def test_no_rows():
    tokens, logprobs = draw_tokens(torch.zeros(0, 9, device=DEVICE), torch.zeros(0, device=DEVICE).double(), 1.0)
    assert tokens.shape == logprobs.shape == (0,)
