"""Credentials are recognized in URLs and in the commands of agents; other text is left alone."""

from __future__ import annotations

import pytest

from megatron_dta.common.secrets import redacted
from megatron_dta.training.arguments import parse_settings
from megatron_dta.training.config.train import settings_by_flag


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("http://me:pw@host:8000/v1", "http://***@host:8000/v1"),
        ("HTTPS://me:p@w@host", "HTTPS://***@host"),
        ("http://token@host", "http://***@host"),
        ("http://me:p/w?@host:1: refused", "http://***@host:1: refused"),
        ("['http://a:b@x', 'http://c:d@y']", "['http://***@x', 'http://***@y']"),
        ("http://h/score?n=1&api_key=abc&x=2", "http://h/score?n=1&api_key=***&x=2"),
        ("http://h/score?token=abc", "http://h/score?token=***"),
        ("OPENAI_API_KEY=sk-1 run --n 2", "OPENAI_API_KEY=*** run --n 2"),
        ("run --api-key 'sk 1' --password=x", "run --api-key *** --password=***"),
    ],
)
def test_credentials_are_hidden(text: str, shown: str) -> None:
    assert redacted(text) == shown
    assert redacted(shown) == shown


@pytest.mark.parametrize(
    "text",
    [
        "http://host:8000/v1",
        "http://host:8000/a@b",
        "https://host/a@b and me@host",
        "--tokenizer-model runs/a@b --eos-id 2",
        "the key=value pairs of eos_token=<|im_end|>",
        "--rollout-max-response-len 16 --input-key prompt",
    ],
)
def test_other_text_is_left_alone(text: str) -> None:
    assert redacted(text) == text


def test_stored_settings_hold_no_credentials() -> None:
    flags = "--num-layers 1 --hidden-size 8 --num-attention-heads 1 --rollout-server-url http://a:b@x http://c:d@y"
    stored = settings_by_flag(parse_settings([*flags.split(), "--agent-command", "run --api-key sk-1"]))
    assert stored["--rollout-server-url"] == ["http://***@x", "http://***@y"]
    assert stored["--agent-command"] == "run --api-key ***"
