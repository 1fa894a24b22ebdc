"""Tests of the integration with verl; they run where verl is installed (``bash tests/run.sh verl``)."""

import importlib.util
import os
import socket
from pathlib import Path

import pytest

import forked


def _free_port() -> int:
    with socket.socket() as port_socket:
        port_socket.bind(("127.0.0.1", 0))
        return port_socket.getsockname()[1]


if importlib.util.find_spec("verl") is None:
    collect_ignore_glob = ["*"]
else:
    # Read by verl when it is imported, here and in the programs that the tests start.
    os.environ["VERL_PLATFORM"] = "cpu"
    os.environ["VERL_USE_EXTERNAL_MODULES"] = "cpu_platform,cpu_rollout"
    os.environ["HF_HUB_OFFLINE"] = "1"
    # Tests of one rank run in the test process, which is a rank of verl's own.
    os.environ |= {"WORLD_SIZE": "1", "RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
    folders = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(folder for folder in folders if folder)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_finish() -> None:
        """Ranks are forked off a process that has imported verl with the tests, and has run none of them."""
        forked.serve_from_here()


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen3 in Hugging Face's format with random weights and a tokenizer of bytes."""
    from tiny_model import write_tiny_model

    return write_tiny_model(tmp_path_factory.mktemp("model"))
