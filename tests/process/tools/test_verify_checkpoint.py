"""The tool that compares converted checkpoints accepts equal models and names a single changed number."""

import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from conftest import seed_all
from megatron_dta.core.common.errors import InputError
from megatron_dta.core.rollouts.load import write_rollouts
from megatron_dta.core.rollouts.record import Rollout
from megatron_dta.extras.parity.one_pass import Difference, OnePass, differences
from tool_runs import load_script
from verify_checkpoint_cases import FAULTS, verify

transformers = pytest.importorskip("transformers", reason="the other side needs transformers (extra 'test')")

BASE = {
    "vocab_size": 53,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 200,
    "rope_theta": 700.5,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 25,
}
# The other architectures are in tests/training/conversion.
FAMILIES = {
    "llama": ("Llama", {"rope_scaling": LLAMA3, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"rope_scaling": {"rope_type": "yarn", "factor": 3.5, "original_max_position_embeddings": 30}}),
    "mistral": ("Mistral", {"sliding_window": 64}),
    "qwen3_moe": (
        "Qwen3Moe",
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "norm_topk_prob": True,
            # One layer without experts.
            "mlp_only_layers": [0],
            "tie_word_embeddings": True,
            "pad_token_id": 7,
        },
    ),
}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    """(Hugging Face folder, Megatron folder) of every family, random weights everywhere."""
    folder, convert = tmp_path_factory.mktemp("checkpoints"), load_script("tools/convert_hf_to_megatron.py")
    folders = {}
    for seed, (name, (family, settings)) in enumerate(FAMILIES.items()):
        seed_all(seed)
        config = transformers.CONFIG_MAPPING[name].from_dict({**BASE, **settings})
        model = getattr(transformers, f"{family}ForCausalLM")(config)
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, 1.0 if parameter.ndim == 1 else 0.0, 0.2)
        hf, megatron = folder / name, folder / f"{name}-megatron"
        model.save_pretrained(hf)
        flags = ["--hf-checkpoint", str(hf), "--save", str(megatron)]
        flags += ["--max-position-embeddings", "64"] if name == "mistral" else []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "argv", ["convert", *flags])
            convert.main()
        folders[name] = hf, megatron
    return folders


@pytest.mark.parametrize("name", FAMILIES)
def test_converted_checkpoints_agree(name, checkpoints, monkeypatch, capsys):
    status, summary, out = verify(monkeypatch, capsys, *checkpoints[name], "--seq-length", "61", "--seed", "5")
    assert status == 0, out
    assert ("pad_token_id" in out) == ("pad_token_id" in FAMILIES[name][1])
    assert summary["passed"] is True
    assert summary["tokens"] == 4 * 61
    compared = {row["name"] for row in summary["tensors"] if row["kind"] == "gradient"}
    reference = transformers.AutoModelForCausalLM.from_pretrained(checkpoints[name][0])
    assert compared == {parameter for parameter, _ in reference.named_parameters()}
    for kind in ("logits", "logprobs", "loss", "gradient", "weight"):
        assert 0 <= summary[f"max_{kind}_difference"] <= (0 if kind == "weight" else 1e-11)


@pytest.mark.parametrize("fault", [fault for fault, tensor in FAULTS.items() if tensor], ids=lambda f: f.__name__)
def test_faults_are_found(fault, checkpoints, monkeypatch, capsys, tmp_path):
    """In the tensor itself, and in what the model computes."""
    hf, megatron = checkpoints["llama"]
    model = transformers.AutoModelForCausalLM.from_pretrained(hf)
    fault(model)
    model.save_pretrained(tmp_path / "changed")
    status, summary, out = verify(monkeypatch, capsys, tmp_path / "changed", megatron, "--seq-length", "61")
    assert (status, summary["passed"]) == (1, False)
    assert f"weight {FAULTS[fault]} differs by" in out
    rows = [row for row in summary["tensors"] if row["kind"] == "weight" and row["relative"] > 0]
    assert [row["name"] for row in rows] == [FAULTS[fault]]
    for kind in ("logits", "logprobs", "gradient", "weight"):
        assert summary[f"max_{kind}_difference"] > 1e-5


def test_settings_that_differ_are_named(checkpoints, monkeypatch, capsys, tmp_path):
    hf, megatron = checkpoints["llama"]
    shutil.copytree(hf, tmp_path / "changed")
    file = tmp_path / "changed" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"rms_norm_eps": 1.5e-6}))
    with pytest.raises(InputError, match="--norm-epsilon"):
        verify(monkeypatch, capsys, tmp_path / "changed", megatron)


def test_tokens_of_a_file(checkpoints, monkeypatch, capsys, tmp_path):
    generator = seed_all(9)
    lengths = (70, 1, 5, 30)
    rollouts = []
    for length in lengths:
        mask = np.ones(length, bool)
        mask[0] = False
        if length > 1:
            token_ids = generator.integers(0, 53, size=length).astype(np.int32)
            rollouts.append(Rollout(token_ids=token_ids, loss_mask=mask, reward=0.0))
    write_rollouts(tmp_path / "tokens.jsonl", rollouts)
    flags = ("--tokens", str(tmp_path / "tokens.jsonl"), "--seq-length", "50", "--num-sequences", "2")
    status, summary, _ = verify(monkeypatch, capsys, *checkpoints["qwen3"], *flags)
    assert status == 0
    assert summary["tokens"] == 50 + 5
    rollouts[0].token_ids[7] = 53
    write_rollouts(tmp_path / "tokens.jsonl", rollouts)
    with pytest.raises(InputError, match="53"):
        verify(monkeypatch, capsys, *checkpoints["qwen3"], *flags)


def test_what_only_one_side_has_or_is_no_number_is_infinitely_far():
    seed_all(2)

    def outcome(gradients: dict[str, torch.Tensor]) -> OnePass:
        return OnePass([torch.ones(2, 3)], [np.zeros(2)], 1.0, gradients, {})

    zero, unit, broken = torch.zeros(2), torch.ones(2), torch.tensor([0.0, float("nan")])
    rows = differences(
        outcome({"a": zero, "b": unit, "c": zero, "d": broken, "f": 2 * unit, "g": torch.ones(3)}),
        outcome({"a": zero, "b": unit + 0.5, "c": unit * 1e-20, "d": unit, "e": unit, "g": unit}),
    )
    distances = {row.name: row.relative for row in rows if row.kind == "gradient"}
    inf = float("inf")
    # What is zero but for rounding is relative to the other gradients.
    assert distances.pop("c") < 1e-13
    assert distances == {"a": 0, "b": pytest.approx(1 / 3), "d": inf, "e": inf, "f": inf, "g": inf}
    assert rows[0] == Difference("logits", "", 0.0, 0.0)
    backwards = differences(outcome({"c": unit * 1e-20}), outcome({"c": zero}))
    assert backwards[-1].relative == inf
