"""Flags of experts: which layers have experts, and one-line refusals that name the flag."""

from __future__ import annotations

import pytest

from arguments_cases import SAMPLED, parse
from megatron_dta.core.common.errors import InputError
from megatron_dta.core.shapes.moe_layers import parse_moe_layer_freq

MOE = f"{SAMPLED} --swiglu --disable-bias-linear --num-experts 8"


def test_settings_of_experts_are_derived() -> None:
    model = parse(f"{MOE} --moe-layer-freq [0]*1+[1]*1 --ffn-hidden-size 96").model
    assert model.moe_ffn_hidden_size == 96
    assert model.moe_layers == [False, True]
    assert parse(SAMPLED).model.moe_layers == [False, False]


@pytest.mark.parametrize(
    ("text", "layers"),
    [("1", "1111"), ("2", "1010"), ("3", "1001"), ("[0,1]*2", "0101"), ("([0]*3+[1]*1)", "0001"), ("2*[1,0]", "1010")],
)
def test_layer_patterns(text: str, layers: str) -> None:
    assert parse_moe_layer_freq(text, 4) == [entry == "1" for entry in layers]


BAD = [
    (f"{SAMPLED} --swiglu --num-experts 8", "--num-experts needs --disable-bias-linear"),
    (f"{MOE} --moe-router-topk 1", "--moe-router-topk 1 needs --moe-router-score-function sigmoid"),
    (f"{MOE} --moe-router-enable-expert-bias", "--moe-router-enable-expert-bias needs --moe-router-score-function"),
    (f"{MOE} --moe-layer-freq [0]*2", "no layer has experts"),
    (f"{MOE} --moe-layer-freq __import__('os')", "--moe-layer-freq __import__"),
    (f"{MOE} --moe-layer-freq [1]*999999999999", "--moe-layer-freq [1]*999999999999: give a number"),
    (f"{MOE} --num-query-groups 4 --tensor-model-parallel-size 2", "needs --sequence-parallel"),
]


@pytest.mark.parametrize(("line", "message"), BAD, ids=[message for _, message in BAD])
def test_bad_flags_are_refused_in_one_line(line: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        parse(line)
    assert message in str(caught.value)
    messages = getattr(caught.value, "messages", (str(caught.value),))
    assert all("\n" not in text for text in messages)
