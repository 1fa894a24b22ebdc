"""The command line of training has at most 200 flags."""

from megatron_dta.training.arguments import build_parser

MOST_FLAGS = 200


def test_training_has_few_flags():
    flags = [action.option_strings[0] for action in build_parser()._actions if action.dest != "help"]
    assert len(flags) <= MOST_FLAGS
