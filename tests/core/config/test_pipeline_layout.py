"""Which layers a pipeline stage gets, and which layouts are refused."""

import pytest

from megatron_dta.core.common.errors import InputError
from megatron_dta.core.config import ModelConfig, ParallelConfig
from megatron_dta.core.config.derived.pipeline_layout import stage_layers


def layers_of(num_layers: int, layout: str | None, stages: int, chunks: int = 1, vocab_size: int = 100) -> list[int]:
    model = ModelConfig(num_layers=num_layers, hidden_size=64, num_attention_heads=4, vocab_size=vocab_size)
    parallel = ParallelConfig(
        pipeline_model_parallel_size=stages,
        num_virtual_stages_per_pipeline_rank=chunks,
        pipeline_model_parallel_layout=layout,
    )
    return stage_layers(model, parallel)


@pytest.mark.parametrize(
    ("layout", "stages", "chunks", "expected"),
    [
        (None, 1, 1, [12]),
        (None, 2, 3, [2, 2, 2, 2, 2, 2]),
        ("Etttt|tttttttL", 2, 1, None),
        ("Et*5|t*7,L", 2, 1, [5, 7]),
        ("E t*4 | (tt|)*3 ttL", 5, 1, [4, 2, 2, 2, 2]),
        ("E|(t*3|)*4,L", 3, 2, [0, 3, 3, 3, 3, 0]),
    ],
)
def test_layouts_in_megatrons_notation(layout, stages, chunks, expected):
    if expected is None:
        with pytest.raises(InputError, match="has 11 layers, but --num-layers is 12"):
            layers_of(12, layout, stages, chunks)
    else:
        assert layers_of(12, layout, stages, chunks) == expected


def test_auto_counts_the_output_layer():
    """The last stage of a model with a large vocabulary gets fewer layers."""
    assert layers_of(12, "auto", 4, vocab_size=2) == [3, 3, 3, 3]
    large = layers_of(12, "auto", 4, vocab_size=2000)
    assert sum(large) == 12
    assert large[-1] < min(large[:-1])


@pytest.mark.parametrize(
    ("num_layers", "layout", "stages", "message"),
    [
        (10, None, 4, "--num-layers 10 is not divisible by the 4 pipeline stages"),
        (3, "auto", 4, "--num-layers 3 is less than the 4 pipeline stages"),
        (4, "tt|ttL", 2, "must be 'auto', or begin with E"),
        (4, "Ett|t|tL", 2, "has 3 stages, but there are 2"),
        (4, "Ett|tL", 2, "has 3 layers, but --num-layers is 4"),
        (4, "Ett||ttL", 3, "stage 1 has no layer"),
    ],
)
def test_impossible_layouts_are_refused(num_layers, layout, stages, message):
    with pytest.raises(InputError, match=message):
        layers_of(num_layers, layout, stages)
