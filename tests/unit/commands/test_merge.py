"""Shards of ours, and pickled ones of the reference, become the one model that was sharded; anything amiss is named."""

import base64
import dataclasses
import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import PeftConfig
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from transformers import AutoConfig, AutoModelForCausalLM

from tests.engine_cases import SHAPE, build_engine, save_tiny_model, tiny_qwen3
from tests.ranks import run_ranks
from verl.commands.merge import main
from verl.utils.errors import CheckpointError, ConfigError

ODD = tiny_qwen3(intermediate_size=45, tie_word_embeddings=False)  # 45 and 61 rows leave uneven shards


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, Path]:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    configs = {"odd": ODD, "tied": tiny_qwen3(), "experts": AutoConfig.for_model("qwen3_moe", **{**SHAPE, **experts})}
    return {name: save_tiny_model(tmp_path_factory.mktemp(name), config) for name, config in configs.items()}


def assert_same_model(folder: Path, other: Path) -> None:
    ours, theirs = (AutoModelForCausalLM.from_pretrained(f, dtype="auto").state_dict() for f in (folder, other))
    assert ours.keys() == theirs.keys() and len(ours) > 10
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def save_shards(model: Path, saved: Path, contents: tuple[str, ...] = ("model",)) -> None:
    build_engine(model, dtype="fp32").save(saved, contents)


@pytest.mark.parametrize("kind", ["odd", "tied", "experts"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_our_shards_become_the_model_that_was_loaded(models, tmp_path, kind, ranks):
    saved, target = tmp_path / "saved", tmp_path / "merged"
    save_shards(models[kind], saved) if ranks == 1 else run_ranks(ranks, save_shards, models[kind], saved)
    assert main(["merge", "--backend", "fsdp", "--local_dir", str(saved), "--target_dir", str(target)]) == 0
    assert_same_model(target, models[kind])
    assert main(["test", "--local_dir", str(saved), "--test_hf_dir", str(models[kind])]) == 0


def pickle_shards(model: Path, saved: Path, mesh_shape: tuple[int, ...], prefix: str, dtype: torch.dtype) -> None:
    """What the reference writes: state dicts of DTensors, tied names twice, under the names of wrapped modules."""
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=("ddp", "fsdp")[-len(mesh_shape) :])
    placements = [Replicate(), Shard(0)][-len(mesh_shape) :]
    state = AutoModelForCausalLM.from_pretrained(model, dtype=dtype).state_dict()
    shards = {prefix + name: distribute_tensor(tensor, mesh, placements) for name, tensor in state.items()}
    torch.save(shards, saved / f"model_world_size_{dist.get_world_size()}_rank_{dist.get_rank()}.pt")


def reference_folder(model: Path, folder: Path) -> Path:
    """The rest of such a checkpoint."""
    (folder / "huggingface").mkdir(parents=True)
    (folder / "huggingface" / "config.json").write_text((model / "config.json").read_text())
    return folder


@pytest.mark.parametrize(
    ("kind", "mesh", "prefix"),
    [("odd", (2,), ""), ("tied", (2,), "_fsdp_wrapped_module."), ("odd", (2, 2), ""), ("experts", (2,), "")],
)
def test_pickled_shards_of_the_reference_become_the_model(models, tmp_path, kind, mesh, prefix):
    saved = reference_folder(models[kind], tmp_path / "saved")
    ranks = 4 if len(mesh) == 2 else 2
    run_ranks(ranks, pickle_shards, models[kind], saved, mesh, prefix, torch.float32)
    assert main(["--local_dir", str(saved), "--target_dir", str(tmp_path / "merged")]) == 0
    assert_same_model(tmp_path / "merged", models[kind])


def test_plain_tensors_of_one_rank_are_read_too(models, tmp_path):
    saved = reference_folder(models["odd"], tmp_path / "saved")
    state = AutoModelForCausalLM.from_pretrained(models["odd"], dtype=torch.bfloat16).state_dict()
    torch.save(state, saved / "model_world_size_1_rank_0.pt")
    main(["merge", "--local_dir", str(saved), "--target_dir", str(tmp_path / "merged")])
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    assert all(torch.equal(merged[name], state[name]) for name in state)
    assert json.loads((tmp_path / "merged" / "config.json").read_text())["dtype"] == "bfloat16"


class Evil:
    def __reduce__(self):
        return os.system, ("touch ran",)


def test_a_pickle_that_would_run_code_is_refused_and_runs_none(models, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    saved = reference_folder(models["odd"], tmp_path / "saved")
    torch.save({"a": torch.ones(1), "b": Evil()}, saved / "model_world_size_1_rank_0.pt")
    with pytest.raises(CheckpointError, match=r"model_world_size_1_rank_0\.pt cannot be read as tensors alone"):
        main(["merge", "--local_dir", str(saved), "--target_dir", "merged"])
    assert not (tmp_path / "ran").exists() and not (tmp_path / "merged").exists()


def test_a_rank_that_is_missing_is_named(models, tmp_path):
    saved = reference_folder(models["odd"], tmp_path / "saved")
    torch.save({}, saved / "model_world_size_3_rank_0.pt")
    torch.save({}, saved / "model_world_size_3_rank_2.pt")
    with pytest.raises(CheckpointError, match=r"ranks 1 of 3: model_world_size_3_rank_1\.pt is missing"):
        main(["merge", "--local_dir", str(saved), "--target_dir", str(tmp_path / "merged")])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: state.pop("model.norm.weight"), r"model\.norm\.weight is missing"),
        (lambda state: state.update(extra=torch.ones(2)), "extra is not in Qwen3ForCausalLM"),
        (lambda state: state.update({"model.norm.weight": torch.ones(7)}), r"norm\.weight is \(7,\), config.json says"),
    ],
    ids=["missing", "unknown", "shape"],
)
def test_tensors_that_do_not_fit_the_configuration_are_named(models, tmp_path, change, message):
    saved = reference_folder(models["odd"], tmp_path / "saved")
    state = AutoModelForCausalLM.from_pretrained(models["odd"]).state_dict()
    change(state)
    torch.save(dict(state), saved / "model_world_size_1_rank_0.pt")
    with pytest.raises(CheckpointError, match=message):
        main(["merge", "--local_dir", str(saved), "--target_dir", str(tmp_path / "merged")])


def test_a_head_that_is_said_to_be_the_embedding_and_is_not_is_not_dropped(models, tmp_path):
    save_shards(models["odd"], tmp_path / "saved")
    words = ["--local_dir", str(tmp_path / "saved"), "--target_dir", str(tmp_path / "merged"), "--tie-word-embedding"]
    with pytest.raises(
        CheckpointError, match=r"lm_head\.weight and model\.embed_tokens\.weight are one tensor .* differ"
    ):
        main(["merge", *words])


@pytest.mark.parametrize("text", ["{", '{"model_type": "nobody"}'])
def test_a_configuration_nobody_can_read_is_named(tmp_path, text):
    save_shards(save_tiny_model(tmp_path / "model"), tmp_path / "saved")
    (tmp_path / "saved" / "huggingface" / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"huggingface/config\.json cannot be used: "):
        main(["merge", "--local_dir", str(tmp_path / "saved"), "--target_dir", str(tmp_path / "merged")])


def test_a_damaged_shard_a_taken_target_and_a_wrong_folder_are_refused(models, tmp_path):
    saved = tmp_path / "saved"
    save_shards(models["odd"], saved, ("model", "hf_model"))
    where = ["--local_dir", str(saved)]
    with pytest.raises(CheckpointError, match="exists already"):
        main(["merge", *where, "--target_dir", str(models["odd"])])
    with pytest.raises(CheckpointError, match=r"global_step_N/actor"):
        main(["merge", "--local_dir", str(tmp_path), "--target_dir", str(tmp_path / "merged")])
    victim = saved / "model_world_size_1_rank_0.safetensors"
    data = bytearray(victim.read_bytes())
    data[-1] ^= 1
    victim.write_bytes(bytes(data))
    with pytest.raises(CheckpointError, match=f"{victim.name} is damaged"):
        main(["merge", *where, "--target_dir", str(tmp_path / "merged")])
    for refused in (["--backend", "megatron"], ["--trust-remote-code"]):
        with pytest.raises(ConfigError, match=refused[0]):
            main(["merge", *where, *refused, "--target_dir", str(tmp_path / "merged")])


def test_adapters_alone_and_a_target_nobody_can_write_are_refused(models, tmp_path):
    engine = build_engine(models["odd"], "fp32", model={"lora_rank": 2, "target_modules": "all-linear"})
    engine.checkpoint_config = dataclasses.replace(engine.checkpoint_config, save_lora_only=True)
    engine.save(tmp_path / "adapters")
    with pytest.raises(CheckpointError, match=r"LoRA adapters alone .*lora_adapter folder"):
        main(["merge", "--local_dir", str(tmp_path / "adapters"), "--target_dir", str(tmp_path / "merged")])
    save_shards(models["odd"], tmp_path / "saved")
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=r"could not be written: .*Not a directory"):
        main(["merge", "--local_dir", str(tmp_path / "saved"), "--target_dir", str(tmp_path / "file" / "merged")])


def test_a_difference_is_named_by_the_comparison(models, tmp_path):
    save_shards(models["odd"], tmp_path / "saved")
    other = save_tiny_model(tmp_path / "other", ODD, seed=1)
    with pytest.raises(CheckpointError, match=r"values of model\.embed_tokens\.weight differ by up to 0\.\d+ from"):
        main(["test", "--local_dir", str(tmp_path / "saved"), "--test_hf_dir", str(other)])
    with pytest.raises(CheckpointError, match=r"on one side only, first lm_head\.weight, in the shards"):
        main(["test", "--local_dir", str(tmp_path / "saved"), "--test_hf_dir", str(models["tied"])])


def test_adapters_of_the_reference_go_to_a_folder_of_their_own(models, tmp_path, capsys):
    saved = reference_folder(models["odd"], tmp_path / "saved")
    plain = AutoModelForCausalLM.from_pretrained(models["odd"]).state_dict()
    adapted = "model.layers.0.mlp.up_proj"
    state = {f"base_model.model.{name.replace(adapted, adapted + '.base_layer')}": t for name, t in plain.items()}
    a, b = torch.randn(2, 32), torch.randn(45, 2)
    state |= {f"base_model.model.{adapted}.lora_{n}.default.weight": t for n, t in (("A", a), ("B", b))}
    torch.save(state, saved / "model_world_size_1_rank_0.pt")
    with pytest.raises(CheckpointError, match=r"no lora_train_meta\.json"):
        main(["--local_dir", str(saved), "--target_dir", str(tmp_path / "merged")])
    (saved / "lora_train_meta.json").write_text('{"r": 2, "lora_alpha": 8, "task_type": "CAUSAL_LM"}')
    main(["--local_dir", str(saved), "--target_dir", str(tmp_path / "merged")])
    assert "the model without its adapters" in capsys.readouterr().out
    assert_same_model(tmp_path / "merged", models["odd"])
    settings = PeftConfig.from_pretrained(str(tmp_path / "merged" / "lora_adapter"))
    assert (settings.r, settings.lora_alpha, settings.target_modules) == (2, 8, {"up_proj"})
    weights = load_file(tmp_path / "merged" / "lora_adapter" / "adapter_model.safetensors")
    assert torch.equal(weights[f"base_model.model.{adapted}.lora_A.weight"], a)


@pytest.mark.parametrize("text", ['{"num_return_sequences": 4, "eos_token_id": 2}', "[3]", "{"])
def test_a_generation_config_that_transformers_refuses_is_known_before_the_weights_are_written(
    models, tmp_path, caplog, text
):
    save_shards(models["odd"], tmp_path / "saved")
    (tmp_path / "saved" / "huggingface" / "generation_config.json").write_text(text)
    merge = ["merge", "--local_dir", str(tmp_path / "saved"), "--target_dir", str(tmp_path / "merged")]
    if "eos" not in text:
        with pytest.raises(CheckpointError, match=r"generation_config\.json of the checkpoint holds no settings"):
            main(merge)
        assert [p.name for p in tmp_path.iterdir()] == ["saved"]
        return
    assert main(merge) == 0 and "leaves out num_return_sequences=4" in caplog.text
    assert_same_model(tmp_path / "merged", models["odd"])
    assert json.loads((tmp_path / "merged" / "generation_config.json").read_text()) == {"eos_token_id": 2}


class FakeHub(BaseHTTPRequestHandler):
    """As much of a hub as an upload asks for: `server.files` are committed, `server.repositories` made."""

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        server: Any = self.server
        if self.path == "/api/repos/create":
            server.repositories.append(json.loads(body))
            self.answer({"url": "https://huggingface.co/me/merged", "name": "me/merged"})
        elif "/preupload/" in self.path:
            files = [file["path"] for file in json.loads(body)["files"]]
            modes = [{"path": path, "uploadMode": "regular", "shouldIgnore": False} for path in files]
            self.answer({"files": modes})
        elif "/commit/" in self.path:
            lines = [json.loads(line) for line in body.splitlines()]
            files = [line["value"] for line in lines if line["key"] == "file"]
            server.files.update({file["path"]: base64.b64decode(file["content"]) for file in files})
            self.answer({"success": True, "commitUrl": "https://huggingface.co/me/merged/commit/1", "commitOid": "1"})
        else:
            self.answer({})

    def do_GET(self):
        self.answer({"id": "me/merged", "siblings": [], "sha": "0"})

    def answer(self, value: dict) -> None:
        data = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def hub(monkeypatch):
    server: Any = ThreadingHTTPServer(("127.0.0.1", 0), FakeHub)
    server.files, server.repositories = {}, []
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    yield server
    server.shutdown()
    server.server_close()


def test_the_merged_folder_is_uploaded_as_it_is(models, tmp_path, hub):
    save_shards(models["odd"], tmp_path / "saved")
    how = ["--target_dir", str(tmp_path / "merged"), "--hf_upload_path", "me/merged", "--private"]
    assert main(["merge", "--local_dir", str(tmp_path / "saved"), *how]) == 0
    here = [path for path in (tmp_path / "merged").rglob("*") if path.is_file()]
    assert hub.files == {str(path.relative_to(tmp_path / "merged")): path.read_bytes() for path in here}
    assert hub.files["model.safetensors"] and hub.repositories[0]["visibility"] == "private"


@pytest.mark.parametrize("why", ["offline", "no answer"])
def test_an_upload_that_fails_says_why_and_keeps_the_model(models, tmp_path, hub, monkeypatch, why):
    if why == "offline":
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    else:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")  # nobody listens there
    save_shards(models["odd"], tmp_path / "saved")
    how = ["--target_dir", str(tmp_path / "merged"), "--hf_upload_path", "me/merged"]
    with pytest.raises(ConfigError, match=r"nothing was uploaded to http://127.* is whole in .*merged; once online"):
        main(["merge", "--local_dir", str(tmp_path / "saved"), *how])
    assert_same_model(tmp_path / "merged", models["odd"])
    assert hub.files == {}


def test_the_module_is_a_command(tmp_path):
    command = [sys.executable, "-m", "verl.model_merger", "merge", "--local_dir", str(tmp_path)]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 1 and "error:" in run.stderr and "Traceback" not in run.stderr


def test_a_damaged_file_that_the_merged_model_takes_over_is_said(models, tmp_path, capsys):
    saved = tmp_path / "saved"
    save_shards(models["odd"], saved)
    main(["merge", "--local_dir", str(saved), "--target_dir", str(tmp_path / "sound")])
    assert "warning" not in capsys.readouterr().err
    with open(saved / "huggingface" / "config.json", "a") as file:
        file.write("\n")
    main(["merge", "--local_dir", str(saved), "--target_dir", str(tmp_path / "merged")])
    assert "huggingface/config.json is damaged" in capsys.readouterr().err
