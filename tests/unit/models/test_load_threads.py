"""What loading a model changes in the process."""

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig

from verl.models import load


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize(("cores", "chosen", "wanted"), [(1, None, 1), (2, None, 2), (8, None, 2), (1, "2", 2)])
def test_a_loaded_model_computes_with_no_more_threads_than_the_process_has_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cores: int, chosen: str | None, wanted: int
):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if chosen:
        monkeypatch.setenv("OMP_NUM_THREADS", chosen)
    monkeypatch.setattr(load, "num_cores", lambda: cores)
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2, "num_key_value_heads": 2}
    LlamaConfig(vocab_size=8, num_hidden_layers=1, **sizes).save_pretrained(tmp_path)
    load.load_causal_lm(tmp_path, structure_only=True)
    assert torch.get_num_threads() == wanted
