"""The parity tool on real rollouts, in all modes, against both references; and what it does when it fails."""

import json
import sys

import pytest

from conftest import REPOSITORY, rollout_file
from megatron_dta.core.common.errors import InputError

KEYS = ("max_loss_error", "max_logprob_error", "max_gradient_error")
pytest.importorskip("transformers", reason="the Hugging Face reference needs transformers (extra 'test')")


@pytest.fixture(scope="module")
def tool():
    from megatron_dta.commands import check_parity

    return check_parity


def run(tool, monkeypatch, capsys, *arguments: str) -> tuple[int, dict]:
    monkeypatch.setattr(sys, "argv", ["check_parity.py", *arguments, "--json"])
    status = tool.main()
    return status, json.loads(capsys.readouterr().out.strip().splitlines()[-1])


@pytest.mark.parametrize(
    ("name", "sample_granularity"),
    [("tau1_airline_qwen25_3x50", "turn"), ("tot_game24_bfs", "trajectory"), ("math_qwen25_8x100", "trajectory")],
)
def test_real_rollouts_agree_with_both_references(tool, monkeypatch, capsys, name, sample_granularity):
    path = str(rollout_file(f"{name}.npz"))
    cut = f"--max-sequences 5 --max-length 30 --sample-granularity {sample_granularity} --hidden-size 32".split()
    status, summary = run(tool, monkeypatch, capsys, path, *cut)
    assert status == 0
    assert summary["passed"] is True
    assert len(summary["cases"]) == 6
    for key in KEYS:
        assert 0 <= summary[key] < 1e-12
        assert 0 <= summary[f"hf_{key}"] < 1e-5


def test_hybrid_models_on_real_rollouts(tool, monkeypatch, capsys, tmp_path):
    """Qwen3.5's shape in small: three layers of gated delta net, then one with gated attention."""
    config = dict(architectures=["Qwen3_5ForCausalLM"], vocab_size=99, initializer_range=0.1, hidden_size=32)
    config |= dict(intermediate_size=48, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=16)
    config |= dict(linear_key_head_dim=8, linear_value_head_dim=8, linear_num_key_heads=2, linear_num_value_heads=4)
    (tmp_path / "config.json").write_text(json.dumps(config))
    cut = ["--max-sequences", "4", "--max-length", "30", "--hf-checkpoint", str(tmp_path)]
    # The terms of a decay's gradient cancel: in float32 transformers' own error against float64 is above 1e-5.
    cut += ["--hf-tolerance", "1e-4"]
    rollouts = str(rollout_file("tau1_airline_qwen25_3x50.npz"))
    status, summary = run(tool, monkeypatch, capsys, rollouts, *cut)
    assert status == 0, summary
    assert all(0 <= summary[key] < 1e-12 for key in KEYS)
    assert all(0 <= summary[f"hf_{key}"] < 1e-5 for key in KEYS[:2])
    with pytest.raises(InputError, match=r"--num-layers 3: .* the first 4 are needed for layers of every kind"):
        run(tool, monkeypatch, capsys, rollouts, *cut, "--num-layers", "3")


def test_status_is_1_above_the_tolerance(tool, monkeypatch, capsys):
    path = str(REPOSITORY / "examples" / "rollouts.example.jsonl")
    for flag in ("--tolerance", "--hf-tolerance"):
        status, summary = run(tool, monkeypatch, capsys, path, flag, "1e-30", "--tree-mode", "dta")
        assert status == 1
        assert summary["passed"] is False
