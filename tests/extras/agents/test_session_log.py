"""The file of a gateway and its key: where they cannot be, and that they belong to one gateway at a time."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_dta.commands.servers import gateway as gateway_command
from megatron_dta.core.common.errors import InputError
from megatron_dta.extras.agents.gateway.session_log import SessionLog


def test_a_log_below_a_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    for path in (file / "log.jsonl", file / "folder" / "log.jsonl"):
        with pytest.raises(InputError, match=rf"cannot be written \({file} is a file, not a folder\)"):
            SessionLog(path)


def test_a_log_belongs_to_one_gateway(tmp_path: Path) -> None:
    """A second gateway with the same --output or the same --key-file is refused, and the first keeps its key."""
    log, key_file = SessionLog(tmp_path / "log.jsonl"), tmp_path / "file.key"
    with pytest.raises(InputError, match=r"log.jsonl: belongs to another gateway that is running"):
        SessionLog(tmp_path / "log.jsonl")
    log.close()
    SessionLog(tmp_path / "log.jsonl").close()
    key_file.write_text("old")
    arguments = SimpleNamespace(output=str(tmp_path / "log.jsonl"), key_file=str(key_file))
    key = gateway_command._key(arguments)
    assert key_file.read_text() == key + "\n"
    assert key_file.stat().st_mode & 0o777 == 0o600
    with pytest.raises(InputError, match=r"--key-file .*file.key: belongs to another gateway that is running"):
        gateway_command._key(arguments)
    assert key_file.read_text() == key + "\n"
    with pytest.raises(InputError, match=r"--key-file .*: is --output"):
        gateway_command._key(SimpleNamespace(output=arguments.output, key_file=arguments.output))
    with pytest.raises(InputError, match=r"--key-file .*: cannot be written"):
        gateway_command._key(SimpleNamespace(output=arguments.output, key_file=str(tmp_path)))
    gateway_command._KEY_FILES.pop().close()
