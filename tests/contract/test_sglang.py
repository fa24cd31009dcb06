"""SGLang without SGLang: its arguments and requests against the package's own source, and what the client does."""

import ast
import asyncio
import functools
import http.server
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from scripts import dashboards
from tests.conftest import skip_or_fail
from tests.engine_work import work_of
from tests.rollout_adapters import CONFIG, EOS, PROMPT, letters_tokenizer, native_behind, small_model
from tests.standins import SGLANG_PATHS, SGLANG_QUESTIONS, FakeSGLangServer
from verl.config import load_config
from verl.config.profiler import ProfilerConfig, ToolConfig, TorchToolConfig
from verl.config.rollout import EngineKwargsConfig, RolloutConfig, ServerConfig
from verl.observe.prometheus_targets import ROLLOUT_JOB, write_targets
from verl.rewards.reward_servers import classifier_command
from verl.utils.errors import ConfigError, WorkerError
from verl.weight_sync.copy_sync import CopySync
from verl.weight_sync.logprob_probe import LogprobProbe, probe_sequences
from verl.workers.rollout.base import GenerationRequest, RolloutEngine, SamplingParams, StaleWeightsError
from verl.workers.rollout.engine_stats import EngineStats
from verl.workers.rollout.engines import find_rollout_engine
from verl.workers.rollout.registry import EngineInputs
from verl.workers.rollout.router import Router
from verl.workers.rollout.sglang import SGLangEngine, command_line, sglang_arguments
from verl.workers.rollout.tgi import TGIEngine

VERSION = "0.5.23"
PROFILED = ProfilerConfig(
    tool="torch",
    enable=True,
    ranks=[0],
    save_path="/p",
    tool_config=ToolConfig(torch=TorchToolConfig(contents=["stack"])),
)


@pytest.fixture(scope="session")
def sources(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """The package's wheel, downloaded and only read."""
    given = os.environ.get("VERL_SGLANG_WHEEL")
    folder = Path(given).parent if given else tmp_path_factory.mktemp("sglang")
    if not given:
        download = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", f"sglang=={VERSION}", "-d", str(folder)]
        if subprocess.run(download, capture_output=True).returncode:
            skip_or_fail(f"the wheel of sglang {VERSION} cannot be downloaded; set VERL_SGLANG_WHEEL")
    return zipfile.ZipFile(next(folder.glob("sglang-*.whl")))


@functools.cache
def fields_of(sources: zipfile.ZipFile, file: str, name: str) -> set[str]:
    """Annotated names of a class."""
    tree = ast.parse(sources.read(f"sglang/srt/{file}").decode())
    [found] = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == name]
    return {
        node.target.id for node in found.body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }


def full_config() -> RolloutConfig:
    extra = {
        "attention_backend": "ascend", "deepep_mode": "auto", "moe_a2a_backend": "deepep", "enable_dp_attention": True,
        "chunked_prefill_size": -1,
    }  # fmt: skip
    return replace(CONFIG, cudagraph_capture_sizes=[1, 2], engine_kwargs=EngineKwargsConfig(sglang=extra))


def argument_sources(sources: zipfile.ZipFile) -> str:
    """The files that declare the server's arguments."""
    files = [n for n in sources.namelist() if n.startswith("sglang/srt/server_args") or "/arg_groups/" in n]
    return " ".join(sources.read(n).decode() for n in files)


def test_a_reward_model_is_started_with_arguments_and_asked_by_a_path_that_the_package_has(sources: zipfile.ZipFile):
    model = ["enable=True", "model_path=m", "rollout.name=sglang", "rollout.max_model_len=9", "rollout.dtype=float16"]
    config = load_config([f"reward.reward_model.{key}" for key in model])
    names = argument_sources(sources)
    flags = [
        word for word in classifier_command(config.reward.reward_model, True, "127.0.0.1", 1) if word.startswith("--")
    ]
    assert len(flags) > 10
    for flag in flags:
        assert f"{flag.removeprefix('--').replace('-', '_')}:" in names or f'"{flag}"' in names, flag
    assert '"/v1/embeddings"' in sources.read("sglang/srt/entrypoints/http_server.py").decode()


def test_every_argument_is_one_of_the_packages(sources: zipfile.ZipFile):
    names = argument_sources(sources)
    for name in sglang_arguments(full_config(), "x"):
        assert f"{name}:" in names or f'"--{name.replace("_", "-")}"' in names, name


def test_requests_have_the_fields_of_the_packages_classes(sources: zipfile.ZipFile):
    fake_server = FakeSGLangServer(native_behind(small_model(), CONFIG), letters_tokenizer())
    config = replace(CONFIG, server=ServerConfig(url=fake_server.url), profiler=PROFILED)
    engine = SGLangEngine(config, "nowhere", (EOS,))
    asyncio.run(engine.set_profiling(True))
    asyncio.run(engine.generate(GenerationRequest(1, PROMPT, SamplingParams(max_tokens=3))))
    asyncio.run(engine.compute_logprobs([PROMPT]))
    asyncio.run(engine.set_profiling(False))
    asyncio.run(engine.update_weights(small_model(), 2))
    asyncio.run(engine.sleep())
    asyncio.run(engine.wake())
    fake_server.close()
    bodies = dict(fake_server.calls)
    first = next(body for name, body in fake_server.calls if name == "generate")
    for body in (first, bodies["generate"]):
        assert body.keys() - {"rid"} <= fields_of(sources, "managers/io_struct.py", "GenerateReqInput")
        assert body["sampling_params"].keys() <= fields_of(sources, "sampling/sampling_params.py", "SamplingParams")
    assert bodies["start_profile"].keys() <= fields_of(sources, "managers/io_struct.py", "ProfileReq")
    assert bodies["update"].keys() <= fields_of(sources, "managers/io_struct.py", "UpdateWeightFromDiskReqInput")
    assert bodies["release"].keys() <= fields_of(sources, "managers/io_struct.py", "ReleaseMemoryOccupationReqInput")
    routes = sources.read("sglang/srt/entrypoints/http_server.py").decode()
    assert all(f'"/{name}"' in routes for name in (*SGLANG_PATHS, *SGLANG_QUESTIONS))


def test_the_server_answers_prometheus_at_the_path_and_with_the_series_that_dashboards_draw(sources: zipfile.ZipFile):
    assert 'Mount("/metrics"' in sources.read("sglang/srt/utils/common.py").decode()
    names = [n for n in sources.namelist() if n.startswith("sglang/srt/observability/")]
    collected = " ".join(sources.read(name).decode() for name in names)
    queries = [query for _, panels in dashboards.DASHBOARDS.values() for _, query, _, _ in panels]
    drawn = {series for query in queries for series in re.findall(r"sglang:\w+", query)}
    assert drawn and all(f'"{series}"' in collected for series in drawn)


def test_targets_are_the_addresses_of_the_servers_that_show_their_statistics(tmp_path: Path):
    servers = [FakeSGLangServer(native_behind(small_model(), CONFIG), letters_tokenizer()) for _ in range(2)]
    shown, hidden = replace(CONFIG, disable_log_stats=False), replace(CONFIG, disable_log_stats=True)
    arguments = (sglang_arguments(shown, "m")["enable_metrics"], sglang_arguments(hidden, "m")["enable_metrics"])
    assert arguments == (True, False)

    def engine(config: RolloutConfig, url: str) -> SGLangEngine:
        return SGLangEngine(replace(config, server=ServerConfig(url=url)), "nowhere", (EOS,))

    urls = [servers[0].url, f"{servers[1].url}/"]
    both = Router([engine(shown, url) for url in urls])
    assert list(both.metrics_addresses) == [server.url.removeprefix("http://") for server in servers]
    assert list(engine(hidden, servers[0].url).metrics_addresses) == []
    file = tmp_path / "prometheus.yml"
    write_targets(file, {ROLLOUT_JOB: (list(both.metrics_addresses), {"served_model_name": "m"})})
    [job] = yaml.safe_load(file.read_text())["scrape_configs"]
    for target in job["static_configs"][0]["targets"]:
        host, port = target.split(":")
        socket.create_connection((host, int(port)), timeout=5).close()
    for server in servers:
        server.close()


def test_a_server_that_is_selected_records_and_another_does_not():
    fake_server = FakeSGLangServer(native_behind(small_model(), CONFIG), letters_tokenizer())
    config = replace(CONFIG, server=ServerConfig(url=fake_server.url), profiler=PROFILED)
    for replica in (0, 1):
        engine = SGLangEngine(config, "nowhere", (EOS,), replica=replica)
        asyncio.run(engine.set_profiling(True))
        asyncio.run(engine.set_profiling(False))
    fake_server.close()
    body = {"output_dir": "/p/agent_loop_rollout_replica_0", "activities": ["CPU", "GPU"], "with_stack": True}
    assert fake_server.calls == [("start_profile", {**body, "record_shapes": False}), ("stop_profile", {})]


def test_the_command_line_has_flags_values_and_lists():
    words = command_line(sglang_arguments(full_config(), "model"))
    assert words[words.index("--cuda-graph-bs-decode") + 1 :][:2] == ["1", "2"]
    assert "--enable-dp-attention" in words and words[words.index("--attention-backend") + 1] == "ascend"
    assert words[words.index("--chunked-prefill-size") + 1] == "-1" and "--disable-cuda-graph" not in words
    with pytest.raises(ConfigError, match=r"engine_kwargs.sglang.port is set by this library"):
        sglang_arguments(replace(CONFIG, engine_kwargs=EngineKwargsConfig(sglang={"port": 1})), "x")


def test_a_publish_is_probed_and_a_refused_one_is_an_error(tmp_path: Path):
    from tests.standins import logprobs_of

    model = small_model(tied=False)
    model.save_pretrained(tmp_path)
    fake_server = FakeSGLangServer(native_behind(model, CONFIG), letters_tokenizer())
    engine = SGLangEngine(replace(CONFIG, server=ServerConfig(url=fake_server.url)), tmp_path, (EOS,))

    async def trainer(sequences):
        return [logprobs_of(model, list(ids)) for ids in sequences]

    sync = CopySync(lambda: model.named_parameters(), engine, LogprobProbe(probe_sequences(EOS + 2), trainer), 1)
    for version in range(2):
        for p in model.parameters():
            p.data.mul_(1.01)
        assert asyncio.run(sync.publish(version)).probes[0].difference < 1e-6
    sync.weights = lambda: [("model.nothing.weight", model.lm_head.weight)]
    with pytest.raises(StaleWeightsError, match=r"refused version 2: no parameter model.nothing.weight"):
        asyncio.run(sync.publish(2))
    fake_server.close()
    lonely = SGLangEngine(replace(CONFIG, server=ServerConfig(url=fake_server.url, max_attempts=1)), tmp_path)
    with pytest.raises(WorkerError, match=r"no answer from http://127.0.0.1.*in 1 attempts"):
        asyncio.run(lonely.client.call("GET", "/health"))


def build(name: str, config: RolloutConfig) -> RolloutEngine:
    inputs = EngineInputs(
        config, letters_tokenizer(), (EOS,), model_path="model", num_replicas=config.num_replicas or 1
    )
    return find_rollout_engine(name).build(inputs)


def test_a_server_that_does_not_start_or_cannot_be_shared_is_told_before_the_run():
    python = shutil.which("false")
    server = ServerConfig(python=python, max_attempts=1, retry_delay=0.01, max_start_wait_time=30)
    with pytest.raises(WorkerError, match=r"the SGLang server did not start: it ended with exit code 1"):
        build("sglang", replace(CONFIG, server=server))
    shared = replace(CONFIG, server=ServerConfig(url="http://127.0.0.1:1"), num_replicas=2)
    with pytest.raises(ConfigError, match=r"names one server, but num_replicas=2"):
        build("sglang", shared)


class Odd(http.server.BaseHTTPRequestHandler):
    """Answers everything with JSON that no server of ours gives, or breaks off."""

    def do_GET(self) -> None:
        self.send_error(404)

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        body = {1: b'{"detail": []}', 2: b"no json", 3: b'{"choices"'}[asked["max_tokens"]]
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body) + 100 * (asked["max_tokens"] == 3)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None: ...


def test_what_is_no_answer_is_an_error_that_names_the_server():
    with pytest.raises(ConfigError, match=r"server.url=127.0.0.1:80 must begin with http://"):
        TGIEngine(replace(CONFIG, server=ServerConfig(url="127.0.0.1:80")), letters_tokenizer())
    odd = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Odd)
    threading.Thread(target=odd.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{odd.server_port}"
    engine = TGIEngine(replace(CONFIG, server=ServerConfig(url=url, max_attempts=1)), letters_tokenizer())
    for max_tokens, says in enumerate(["does not answer as OpenAI", "no answer that can be read", "can be read"], 1):
        with pytest.raises(WorkerError, match=f"{url}.*{says}"):
            asyncio.run(engine.generate(GenerationRequest(0, [1], SamplingParams(max_tokens=max_tokens))))
    odd.shutdown()


class Beginning:
    """A tokenizer that puts a mark before every text, as many do."""

    bos_token = "<s>"
    chat_template = eos_token_id = None
    all_special_ids: tuple[int, ...] = ()
    added_tokens_decoder: tuple[int, ...] = ()

    def convert_ids_to_tokens(self, ids: list[int]) -> list[str]:
        return ["<s>" if i == 0 else chr(i) for i in ids]

    def decode(self, ids: list[int]) -> str:
        return "".join("<s>" if i == 0 else chr(i) for i in ids)

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": [0, *([0] if text.startswith("<s>") else []), *map(ord, text.removeprefix("<s>"))]}


def test_tgi_is_not_given_the_mark_that_it_puts_before_a_text_itself(monkeypatch: pytest.MonkeyPatch):
    engine, sent = TGIEngine(replace(CONFIG, server=ServerConfig(url="http://x")), Beginning()), []

    async def answered(method: str, path: str, body: dict | None = None) -> dict:
        sent.append(body)
        return {"model_id": "x", "details": {"tokens": [{"id": 1, "logprob": -1.0}], "finish_reason": "length"}}

    monkeypatch.setattr(engine.client, "call", answered)
    asyncio.run(engine.generate(GenerationRequest(0, [0, 104, 105], SamplingParams(max_tokens=1))))
    asyncio.run(engine.generate(GenerationRequest(0, [104, 105], SamplingParams(max_tokens=1))))
    assert [body["inputs"] for body in sent if body] == ["hi", "hi"]


class Counted:
    """A replica that reports what it is given."""

    bucket_bytes, dtype = 0, None

    def __init__(self, **stats: float):
        totals = {name: value for name, value in stats.items() if name != "cache_use"}
        self.read = EngineStats(totals, ratios={"cache_use": (stats["cache_use"], 1)} if "cache_use" in stats else {})

    async def stats(self) -> list[EngineStats]:
        return [self.read]


def test_a_replica_that_had_nothing_to_do_has_no_part_in_the_means():
    busy, idle = Counted(generated_tokens=5, cache_use=0.5, preemptions=2), Counted(generated_tokens=0)
    expected = {"generated_tokens": 5, "cache_use": 0.5, "preemptions": 2}
    assert work_of(Router([busy, idle])) == work_of(Router([idle, busy])) == expected


def test_tgi_refuses_to_be_trained(tmp_path: Path):
    from tests.e2e import jobs

    jobs.prepare(tmp_path)
    with pytest.raises(ConfigError, match=r"only generates.*Train with .*native or sglang or vllm; .*`verl generate`"):
        jobs.train(
            tmp_path, "run", "actor_rollout_ref.rollout.name=tgi", "actor_rollout_ref.rollout.server.url=http://x"
        )
    assert load_config(["actor_rollout_ref.model.path=x", "actor_rollout_ref.rollout.name=tgi"])
