"""Cases and helpers that tests of moe trainer share."""

from __future__ import annotations

EXPERTS = (
    "--swiglu --disable-bias-linear --num-experts 4 --moe-ffn-hidden-size 16 --moe-router-score-function sigmoid "
    "--moe-router-enable-expert-bias --moe-router-bias-update-rate 0.01 --moe-aux-loss-coeff 0.01 "
    "--moe-z-loss-coeff 0.001"
)
