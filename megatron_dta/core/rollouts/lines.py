"""Reads the lines of text files of rows, as people have them: gzipped or not, with or without a byte order mark."""

from __future__ import annotations

import codecs
import gzip
import zlib
from collections.abc import Iterator
from pathlib import Path

from megatron_dta.core.common.errors import InputError

_GZIP = b"\x1f\x8b"
# First bytes of files that are something else.
_OTHERS = (
    (codecs.BOM_UTF16_LE, "is UTF-16; save it as UTF-8"),
    (codecs.BOM_UTF16_BE, "is UTF-16; save it as UTF-8"),
    (b"PAR1", "is a Parquet file; give it the suffix .parquet"),
    (b"(\xb5/\xfd", "is compressed with zstd; decompress it first"),
    (b"\xfd7zXZ", "is compressed with xz; decompress it first"),
    (b"BZh", "is compressed with bzip2; decompress it first"),
    (b"PK\x03\x04", "is a zip archive; unpack it first"),
)


def data_suffix(path: Path) -> str:
    """The suffix that tells the format of a file: ".jsonl" also for ``rows.jsonl.gz``."""
    return Path(path.stem).suffix if path.suffix == ".gz" else path.suffix


def numbered_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield (row, line) with rows counted from 1, decompressed and without a byte order mark.

    Raises:
        InputError: the file is no text of UTF-8, or its compressed data is damaged.
    """
    with path.open("rb") as file:
        head = file.read(8)
    for start, meaning in _OTHERS:
        if head.startswith(start):
            raise InputError(f"{path}: {meaning}")
    row = 0
    try:
        with gzip.open(path) if head.startswith(_GZIP) else path.open("rb") as file:
            for row, line in enumerate(file, start=1):
                yield row, line.removeprefix(codecs.BOM_UTF8) if row == 1 else line
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise InputError(f"{path}: row {row + 1} or later: its gzip data is damaged or cut short ({error})") from None
