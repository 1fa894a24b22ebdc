"""Flags of tree sampling: every setting reaches the sampler."""

from arguments_cases import parse
from conftest import REPOSITORY
from megatron_dta.sampling.task import build_task
from megatron_dta.sampling.treepo.settings import TreeSettings
from megatron_dta.sampling.treepo.source import stop_rules
from megatron_dta.training.monitor.benefits import treepo_benefit

BASE = "--num-layers 1 --hidden-size 16 --num-attention-heads 2 --task arithmetic --max-position-embeddings 9000 "
TREE = BASE + "--rollout-method treepo --treepo-segment-length 2 "


def test_what_trees_have_saved_is_one_sentence():
    step = {"effective_leaves": 6.8, "rollouts": 32.0, "response_tokens": 100.0, "decoded_tokens": 2720.0}
    records = [{"iteration": 0}, {"iteration": 1, **step}, {"iteration": 2, **step, "rollout_batch_step": 1}]
    first, last = "TreePO decoded 0.85 of the trained tokens", "; a tree's leaves were worth 6.8 "
    assert treepo_benefit(records).startswith(first + last)
    records = [{**record, "left_out_decoded_tokens": 900.0} for record in records]
    assert treepo_benefit(records).startswith(first + ", and 900 tokens for prompts that were left out" + last)
    assert treepo_benefit([{**step, "decoded_tokens": 3200.0}]) is None
    del step["effective_leaves"]
    assert treepo_benefit([step]) is None


def test_every_flag_reaches_the_sampler():
    config = parse(
        TREE + "--n-samples-per-prompt 12 --treepo-branching-factor 3 --treepo-initial-branches 4 "
        "--treepo-initial-branches-max 6 --treepo-allocation low-logprob --treepo-allocation-temperature 5 "
        "--treepo-fallback finished --treepo-answer-pattern boxed"
    )
    expected = TreeSettings(12, 64, 2, 3, 4, 6, "low-logprob", 5.0, "finished")
    assert TreeSettings.from_config(config.treepo, config.sampling) == expected
    rules = stop_rules(build_task(config.sampling, 9000), config)
    assert rules.answer(r"\boxed{1}")


def test_the_paper_s_recipe_in_the_document_is_accepted():
    text = (REPOSITORY / "docs/tree_sampling.md").read_text()
    recipe = text.split("## The paper's recipe")[1].split("```bash")[1].split("```")[0].replace("\\\n", " ")
    assert parse(f"{BASE} {recipe}").treepo.rollout_method == "treepo"
