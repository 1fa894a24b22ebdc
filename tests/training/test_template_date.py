"""The date that a chat template writes, also in a continued run."""

from dataclasses import replace
from datetime import datetime
from pathlib import Path

import pytest

from chat_folder import CHATML, make_chat_folder
from megatron_dta.core.common.errors import InputError
from megatron_dta.core.config import ModelConfig
from megatron_dta.sampling.config import SamplingConfig
from megatron_dta.sampling.task import chat_template
from megatron_dta.training.config import CheckpointConfig, TrainConfig
from megatron_dta.training.data import template_date
from megatron_dta.training.data.template_date import with_date_of, with_template_date

pytest.importorskip("transformers")

CLOCK = "{{ strftime_now('%Y-%m-%d') }}" + CHATML


def settings(folder: Path, **sampling: object) -> TrainConfig:
    text = SamplingConfig(apply_chat_template=True, tokenizer_model=str(folder), **sampling)
    model = ModelConfig(num_layers=1, hidden_size=8, num_attention_heads=2)
    return TrainConfig(model=model, sampling=text, checkpoint=CheckpointConfig(save=str(folder.parent / "run")))


def test_a_date_is_fixed_where_the_template_writes_it(tmp_path: Path) -> None:
    plain = settings(make_chat_folder(tmp_path / "plain"))
    assert with_template_date(plain, pytest.fail) == (plain, None)
    lines: list[str] = []
    for file in ("tokenizer_config.json", "chat_template.jinja"):
        folder = make_chat_folder(tmp_path / file, CLOCK, file)
        config, device = with_template_date(settings(folder), lines.append)
        date = datetime.fromisoformat(config.sampling.chat_template_date)
        assert device is None
        assert abs((datetime.now() - date).total_seconds()) < 60
        assert config.sampling.chat_template_date in lines[-1]
        given, _ = with_template_date(settings(folder, chat_template_date="2024-07-06"), lines.append)
        assert given.sampling.chat_template_date == "2024-07-06"
        assert chat_template(given.sampling).prompt("hi").startswith("2024-07-06<|im_start|>")
    with pytest.raises(InputError, match="chat_template_date 6 July: must be a date such as"):
        chat_template(settings(folder, chat_template_date="6 July").sampling)


def test_a_continued_run_keeps_its_date(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = settings(make_chat_folder(tmp_path / "model", CLOCK))
    saved = {"megatron_dta": {"settings": '{"--chat-template-date": "2024-07-06T05:04:03"}'}}
    monkeypatch.setattr(template_date, "read_common", lambda path: saved)
    monkeypatch.setattr(template_date, "starting_point", lambda checkpoint: (tmp_path, not checkpoint.finetune))
    kept, _ = with_template_date(config, lambda line: None)
    assert kept.sampling.chat_template_date == "2024-07-06T05:04:03"
    assert with_date_of(config, tmp_path).sampling == kept.sampling
    new, _ = with_template_date(replace(config, checkpoint=CheckpointConfig(finetune=True)), lambda line: None)
    assert new.sampling.chat_template_date not in (None, kept.sampling.chat_template_date)
