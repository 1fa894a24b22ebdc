"""The parity tool on real rollouts, in all modes, against both references; and what it does when it fails."""

from __future__ import annotations

import json
import sys

import pytest

from conftest import REPOSITORY, rollout_file, seed_all
from forked import run_python
from megatron_dta.core.common.errors import InputError

TOOL = REPOSITORY / "tools" / "check_parity.py"
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
    [
        ("tau1_airline_qwen25_3x50.npz", "turn"),
        ("mint_math_thinkstrip_perturn.npz", "trajectory"),
        ("tot_game24_bfs.npz", "trajectory"),
        ("math_qwen25_8x100.npz", "trajectory"),
        ("humaneval_codegen16b_100x40.npz", "trajectory"),
    ],
)
def test_real_rollouts_agree_with_both_references(tool, monkeypatch, capsys, name, sample_granularity):
    path = str(rollout_file(name))
    cut = [
        "--max-sequences",
        "8",
        "--max-length",
        "100",
        "--sample-granularity",
        sample_granularity,
        "--hidden-size",
        "32",
    ]
    status, summary = run(tool, monkeypatch, capsys, path, *cut)
    assert status == 0
    assert summary["passed"] is True
    assert len(summary["cases"]) == 6
    for key in KEYS:
        assert 0 <= summary[key] < 1e-12
        assert 0 <= summary[f"hf_{key}"] < 1e-5


@pytest.mark.parametrize(
    "name",
    [
        *("tau1_airline_qwen25_3x50.npz", "tot_game24_bfs.npz", "math_qwen25_8x100.npz"),
        *("humaneval_codegen16b_100x40.npz", "mint_math_thinkstrip_perturn.npz"),
    ],
)
def test_hybrid_models_on_real_rollouts(tool, monkeypatch, capsys, tmp_path, name):
    """Qwen3.5's shape in small: three layers of gated delta net, then one with gated attention."""
    config = dict(
        architectures=["Qwen3_5ForCausalLM"],
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        vocab_size=99,
        initializer_range=0.1,
    )
    (tmp_path / "config.json").write_text(json.dumps(config))
    cut = ["--max-sequences", "5", "--max-length", "50", "--hf-checkpoint", str(tmp_path)]
    # The terms of a decay's gradient cancel: in float32 transformers' own error against float64 is above 1e-5.
    cut += ["--hf-tolerance", "1e-4"]
    status, summary = run(tool, monkeypatch, capsys, str(rollout_file(name)), *cut)
    assert status == 0, summary
    assert all(0 <= summary[key] < 1e-12 for key in KEYS)
    assert all(0 <= summary[f"hf_{key}"] < 1e-5 for key in KEYS[:2])
    with pytest.raises(InputError, match=r"--num-layers 3: .* the first 4 are needed for attention of both kinds"):
        run(tool, monkeypatch, capsys, str(rollout_file(name)), *cut, "--num-layers", "3")


@pytest.mark.parametrize("kind", ["llama3", "yarn"])
def test_the_shape_and_positions_of_a_checkpoint(tool, monkeypatch, capsys, tmp_path, kind):
    rope = {"rope_type": kind, "factor": 8.0, "original_max_position_embeddings": 9}
    if kind == "llama3":
        rope |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    config = {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "hidden_size": 36,
        "intermediate_size": 50,
        "num_hidden_layers": 5,
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "head_dim": 10,
        "vocab_size": 99,
        "rope_theta": 400.5,
        "rope_scaling": rope,
        "initializer_range": 0.1,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    generator, path, rows = seed_all(4), tmp_path / "rollouts.jsonl", []
    for length in (60, 33, 71):
        token_ids = [5, 7, *generator.integers(0, 40, size=length).tolist()]
        rows.append(
            json.dumps({"token_ids": token_ids, "loss_mask": [0] + [1] * (length + 1), "reward": 1.0, "group_id": "a"})
        )
    path.write_text("\n".join(rows))
    status, summary = run(tool, monkeypatch, capsys, str(path), "--hf-checkpoint", str(tmp_path), "--tree-mode", "dta")
    assert status == 0
    assert summary["hf_max_gradient_error"] < 1e-5
    with pytest.raises(InputError, match="--hidden-size has no effect with --hf-checkpoint"):
        run(tool, monkeypatch, capsys, str(path), "--hf-checkpoint", str(tmp_path), "--hidden-size", "32")


def test_status_is_1_above_the_tolerance(tool, monkeypatch, capsys):
    path = str(REPOSITORY / "examples" / "rollouts.example.jsonl")
    for flag in ("--tolerance", "--hf-tolerance"):
        status, summary = run(tool, monkeypatch, capsys, path, flag, "1e-30", "--tree-mode", "dta")
        assert status == 1
        assert summary["passed"] is False


def test_bad_input_is_one_line(tmp_path):
    broken = tmp_path / "broken.jsonl"
    broken.write_text('{"token_ids": [1, 2, 3], "loss_mask": [0, 1')
    result = run_python([str(TOOL), str(broken)])
    assert result.returncode == 2
    assert result.stderr.strip().splitlines()[-1].startswith(f"error: {broken}: row 1")
    assert "Traceback" not in result.stderr
