"""Cases and helpers that tests of critic trainer share."""

from __future__ import annotations

PPO = (
    "--objective ppo --old-logprobs recompute --use-tis --kl-coef 0.1 --ppo-epochs 2 --shared-token-ownership first "
    "--critic-lr 5e-3"
)


# What the ranks of a mesh sum differently, or count for themselves.
OWN = {"unique_tokens", "token_reuse", "segments", "peak_in_flight_tokens", "recomputed_tokens"}
