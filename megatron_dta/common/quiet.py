"""Hides warnings of libraries, so that the first lines of a run are the run's."""

from __future__ import annotations

import logging
import os
import warnings

# Libraries whose warnings are about their own use or about hardware that is not there.
_LIBRARIES = ("fla", "huggingface_hub", "megatron", "tensorboard", "tokenizers", "transformers", "triton")


def quieten_libraries() -> None:
    """Hide warnings on which users cannot act: missing packages and internals of libraries."""
    warnings.filterwarnings("ignore", message=".*Apex (are|is) not installed")
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.")
    warnings.filterwarnings("ignore", module=rf"({'|'.join(_LIBRARIES)})(\.|$)")
    logging.getLogger("megatron.core").setLevel(logging.ERROR)
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    if logging.lastResort is not None:
        logging.lastResort.addFilter(_is_worth_reading)
    # Megatron's distributed optimizer reads .grad of tensors that are not leaves.
    warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")


def _is_worth_reading(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR or record.name.partition(".")[0] not in _LIBRARIES
