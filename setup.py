"""Installs ``megatron_dta`` and the import package ``dta_kernels`` (from ``kernels/``)."""

from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
# The gateway's server and its schemas; transformers renders chat templates and, from 5.15, parses calls of tools.
GATEWAY = ["uvicorn>=0.30,<1", "starlette>=0.40,<2", "pydantic>=2.7,<3", "transformers>=5.15,<6"]

setup(
    name="megatron_dta",
    version="0.1.0",
    description="Exact RL post-training on prefix trees, on Megatron-Core",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8") if (ROOT / "README.md").exists() else "",
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=[*find_packages(include=["megatron_dta", "megatron_dta.*"]), *find_packages("kernels")],
    package_dir={"dta_kernels": "kernels/dta_kernels"},
    # Compiled where it is used; without a compiler its twin in Python serves.
    package_data={
        "megatron_dta": ["py.typed"],
        "megatron_dta.sampling.speculation": ["suffix_forest.c", "suffix_nodes.h"],
        "megatron_dta.extras.report": ["page.html", "search.js"],
        "megatron_dta.training.config.checks": ["other_names.md"],
        "megatron_dta.integrations.verl": ["hydra/*/*.yaml"],
    },
    entry_points={
        "console_scripts": ["megatron-dta = megatron_dta.cli:run"],
        "verl.plugins": ["megatron_dta = megatron_dta.integrations.verl.plugin"],
    },
    install_requires=[
        # 0.16.1 is the newest for Python 3.11; 0.17 and later need Python 3.12.
        "megatron-core>=0.16.1,<0.20",
        # Megatron-Core 0.19 imports triton, on a CPU too, and PyTorch's CPU builds do not bring it.
        "triton>=3.4; python_version >= '3.12' and platform_system == 'Linux'",
        "numpy",
        "torch>=2.8",
        # megatron.core.dist_checkpointing imports psutil without declaring it.
        "psutil",
        "pyarrow",
        "rich",
        "tensorboard",
        "matplotlib",
        "jinja2",
        "tokenizers",
        "sentencepiece",
        "safetensors>=0.5",
    ],
    extras_require={
        "gpu": ["triton>=3.4"],
        # The kernels of gated delta net (--gated-delta-rule-impl).
        "hybrid": ["triton>=3.4", "fla-core>=0.6.0", "einops"],
        "wandb": ["wandb"],
        "math": ["math-verify"],
        # The client of rollout servers, reward servers and teachers, and the servers of agents and teachers.
        "servers": ["aiohttp", *GATEWAY],
        # Weights over NCCL to vLLM (--rollout-weight-transfer nccl): NVIDIA's binding of NCCL.
        "nccl": ["nccl4py>=0.6,<0.7"],
        # The Hugging Face reference of tools/check_parity.py and the test-suite.
        "parity": ["transformers>=4.57,<6"],
        # GGUF files to Hugging Face folders (examples/real_model/smollm2.py).
        "gguf": ["transformers>=5.0,<6", "gguf>=0.17", "accelerate"],
        # The training engine of verl; the other packages are imported by verl's workers without being declared.
        "verl": [
            "verl>=0.9.1,<0.10",
            "TransferQueue>=0.1.10",
            "uvicorn",
            "fastapi",
            "cachetools",
            "pyzmq",
            "msgspec",
            "aiohttp",
            "nvtx",
        ],
        "test": [
            "aiohttp",
            *GATEWAY,
            # Clients that the gateway is tested with.
            "openai",
            "pytest",
            "pytest-xdist",
            "hypothesis",
            "ruff",
            "import-linter",
            "math-verify",
            # Its interpreter runs the GPU's kernels on a CPU.
            "triton; platform_system == 'Linux'",
        ],
    },
)
