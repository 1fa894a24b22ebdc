"""The part ``das-noise`` of the rollout benchmark: measures how far rounding moves samples.

Plain decoding samples reference sequences. Then the same sequences run in other ways, where every pass continues with
the reference's token instead of its own draw (``forced_engine``). So each token is compared after the same context and
with the same noise. A *flip* is a draw that differs from the reference. The difference d of the logprobs of equal draws
gives the divergence, the mean of exp(d) - 1 - d.

The ways are: the same run again, other numbers of rows in a pass, and drafts, with which a pass has several tokens of
each row. Passes are padded to a few sizes (``padded_rows``), so ``--other-batch`` must give another size than
``--batch``. By default one of them is the size of the passes with drafts, because small passes of different sizes may
be computed by the same kernel in the same order. Additional requests fill passes with fewer requests than rows; they
are not compared.

``flips_per_thousand`` counts all flips. ``parted`` is the number of sequences with a flip. ``until_parted`` counts
flips per thousand tokens up to the first flip of each sequence, as two free runs would show it.

With random weights and temperature 1 the distribution is nearly uniform over the vocabulary. The probability of a token
is then smaller than the rounding of the cumulative sums, so most draws flip to a neighbour; the divergence shows the
effect of rounding on the distribution itself. A low temperature is closer to a trained model.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from common.engine import Setup, build_engine, check_arguments
from common.forced_engine import ForcedEngine, KnownDrafting
from megatron_dta.core.common.errors import InputError
from megatron_dta.sampling.in_process.cuda_graphs import bucket
from megatron_dta.sampling.in_process.drafting import Drafting
from megatron_dta.sampling.interface import GenerationRequest, GenerationResult, generate
from megatron_dta.sampling.params import SamplingParams


def add_noise_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of ``das-noise``."""
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--response-tokens", type=int, default=320)
    parser.add_argument("--requests", type=int, help="default: --batch")
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.1, 1.0])
    parser.add_argument(
        "--other-batch", type=int, nargs="+", help="other numbers of rows (default: a quarter, and those of drafts)"
    )
    parser.add_argument("--draft-tokens", type=int, default=7)


def run_noise(arguments: argparse.Namespace, setup: Setup) -> list[dict[str, Any]]:
    """A row for each temperature and each other way of running the same requests."""
    check_arguments(arguments, "prompt_tokens", "response_tokens", "draft_tokens")
    others = arguments.other_batch or [arguments.batch // 4 + 1, arguments.batch * (arguments.draft_tokens + 1)]
    for other in others:
        if other < 1 or bucket(other) == bucket(arguments.batch):
            raise InputError(
                f"--other-batch {other} must be at least 1 and give passes of another size than --batch "
                f"{arguments.batch}: both run as {bucket(arguments.batch)} rows"
            )
    count = arguments.requests or arguments.batch
    rng = np.random.default_rng(arguments.seed)
    total = max(count, *others)
    prompts = rng.integers(0, setup.model.true_vocab_size, (total, arguments.prompt_tokens)).astype(np.int32)
    everything = [GenerationRequest(i, prompt, arguments.response_tokens, i) for i, prompt in enumerate(prompts)]
    requests = everything[:count]
    rows = []
    for temperature in arguments.temperature:
        params = SamplingParams(1, eos_id=-1, temperature=temperature, seed=arguments.seed)
        engine = build_engine(setup, arguments)
        engine.start(params, 0)
        reference = generate(engine, requests)
        answers = {i: result.token_ids for i, result in enumerate(reference)}
        known = KnownDrafting(answers, arguments.draft_tokens, setup.model.true_vocab_size, arguments.seed)
        ways: list[tuple[str, int, Drafting | None]] = [("the same again", arguments.batch, None)]
        ways += [("another batch size", other, None) for other in others]
        ways += [("drafts", arguments.batch, known)]
        for name, batch, drafting in ways:
            # One pass at a time: within a burst a pass continues with its own tokens.
            changed = argparse.Namespace(**vars(arguments) | {"batch": batch, "burst": 1})
            forced = build_engine(setup, changed, drafting, partial(ForcedEngine, answers))
            forced.start(params, 0)
            generate(forced, everything[: max(count, batch)])
            distances = distance(reference, forced.own)
            padded = bucket(batch * (1 if drafting is None else arguments.draft_tokens + 1))
            settings = {"temperature": temperature, "run": name, "batch": batch, "padded_rows": padded}
            rows.append({"part": "das-noise", **settings, **distances})
    return rows


def distance(
    reference: Sequence[GenerationResult], forced: dict[int, tuple[np.ndarray, np.ndarray]]
) -> dict[str, float | int]:
    """Frequency of different draws after the same contexts, and differences of the logprobs of equal draws."""
    tokens = np.concatenate([result.token_ids for result in reference])
    logprobs = np.concatenate([result.logprobs for result in reference]).astype(np.float64)
    drawn, their_logprobs = (np.concatenate([forced[i][part] for i in range(len(reference))]) for part in (0, 1))
    assert (drawn >= 0).all(), "a token was never drawn"
    same = drawn == tokens
    d = (their_logprobs - logprobs)[same]
    lengths = [len(result.token_ids) for result in reference]
    flips = np.split(~same, np.cumsum(lengths)[:-1])
    parted = sum(bool(own_flips.any()) for own_flips in flips)
    until = sum(int(own_flips.argmax()) + 1 if own_flips.any() else len(own_flips) for own_flips in flips)
    return {
        "flips_per_thousand": 1e3 * float((~same).mean()),
        "parted": parted,
        "until_parted": 1e3 * parted / until,
        "kl": float((np.exp(d) - 1 - d).mean()) if len(d) else 0.0,
        "mean_logprob_difference": float(np.abs(d).mean()) if len(d) else 0.0,
        "compared_tokens": len(tokens),
    }
