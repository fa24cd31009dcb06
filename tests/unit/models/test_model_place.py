"""A model is named by its folder or by the id of one in the local Hugging Face cache; checkpoints name theirs."""

from pathlib import Path

import pytest

from tests.e2e import jobs
from verl.config import ConfigError, HFModelConfig
from verl.models.load import load_causal_lm, load_tokenizer, model_folder

REVISION = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty Hugging Face cache."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "hub"


def test_a_hub_id_is_the_snapshot_in_the_local_cache(cache: Path, tmp_path: Path):
    jobs.prepare(tmp_path)
    repository = cache / "models--org--small"
    (repository / "snapshots").mkdir(parents=True)
    (tmp_path / "model").rename(repository / "snapshots" / REVISION)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(REVISION)
    assert model_folder("org/small") == repository / "snapshots" / REVISION
    assert load_causal_lm("org/small").config.num_hidden_layers == 1
    assert len(load_tokenizer(HFModelConfig(path="org/small"))) > 10


def test_a_hub_id_that_is_not_in_the_cache_offers_the_download(cache: Path):
    with pytest.raises(ConfigError, match=r"`hf download org/other`.*--local-dir"):
        model_folder("org/other")
    with pytest.raises(ConfigError, match=r"not a folder; .* give the folder of a model") as raised:
        model_folder("/nowhere/at/all")
    assert "hf download /nowhere" not in str(raised.value)


@pytest.mark.parametrize("given", ["run", "run/global_step_12", "run/global_step_12/actor"])
def test_a_checkpoint_given_as_a_model_names_the_model_in_it(tmp_path: Path, given: str):
    for step in (2, 12):
        inner = tmp_path / "run" / f"global_step_{step}" / "actor" / "huggingface"
        inner.mkdir(parents=True)
        (inner / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=rf"model\.path={inner}$"):
        model_folder(tmp_path / given)
