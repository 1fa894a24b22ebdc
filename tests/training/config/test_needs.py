"""What settings need: every declared condition can hold, and a setting that nothing reads is refused in one line."""

from __future__ import annotations

import pytest

from arguments_cases import SAMPLED, STORED, parse
from megatron_dta.core.common.errors import InputErrors
from megatron_dta.training.config.checks.needs import parse_condition
from megatron_dta.training.config.train import settings_of


def test_conditions_name_settings_and_their_choices() -> None:
    settings = {setting.name: setting for _, setting, _ in settings_of(parse(SAMPLED))}
    for setting in settings.values():
        for condition in " or ".join(setting.metadata["needs"]).split(" or ") if setting.metadata["needs"] else ():
            name, relation, operand = parse_condition(condition)
            choices = settings[name].metadata["choices"]
            if choices and relation:
                assert set(operand.split(",")) <= set(choices), (setting.name, condition)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (f"{SAMPLED} --finetune", "--finetune has no effect without --load"),
        (f"{STORED} --rollout-top-p 0.9", "--rollout-top-p has no effect without --prompt-data or --task"),
        (f"{SAMPLED} --dpo-beta 1", "--dpo-beta has no effect without --objective dpo"),
        (
            f"{STORED} --objective sft --entropy-coef 1",
            "--entropy-coef has no effect without another --objective than dpo or sft",
        ),
        (
            f"{SAMPLED} --sequence-parallel",
            "--sequence-parallel has no effect without --tensor-model-parallel-size above 1",
        ),
    ],
)
def test_what_nothing_reads_is_refused(line: str, message: str) -> None:
    with pytest.raises(InputErrors) as caught:
        parse(line)
    assert list(caught.value.messages) == [f"{message}; leave it out or add that"]
