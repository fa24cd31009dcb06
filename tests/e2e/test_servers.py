"""Answers for a file, figures for answers, and the official client talking to the server."""

import asyncio
import itertools
import json
import re
import shutil
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.e2e import jobs
from tests.e2e.serving import serving
from verl.commands import generate_answers, score_answers
from verl.commands.generate_answers import run_fingerprint
from verl.commands.score_answers import majority, pass_at, proportion
from verl.commands.serve import command
from verl.commands.serve.server import OpenAIServer
from verl.config import load_config
from verl.data.data_files import FileRows
from verl.data.prompts import train_prompts
from verl.experimental.agent_loop import AgentLoopBase, AgentLoopOutput
from verl.models.load import load_tokenizer
from verl.trainer.ppo.rollout_setup import build_standalone_engine, training_sampling
from verl.utils.errors import DataError, WorkerError
from verl.workers.rollout.base import Completion, GenerationRequest, SamplingParams
from verl.workers.rollout.native.engine import NativeEngine

ARR = "actor_rollout_ref"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    jobs.prepare(tmp_path)
    return tmp_path


def generation(folder: Path, *extra: str) -> list[str]:
    return [
        f"{ARR}.model.path={folder / 'model'}", f"data.train_files={folder / 'data' / 'train.jsonl'}",
        f"data.output_path={folder / 'answers.parquet'}", "data.max_prompt_length=8", "data.max_response_length=8",
        f"{ARR}.rollout.n=4", f"{ARR}.rollout.dtype=float32", *extra,
    ]  # fmt: skip


def test_every_prompt_is_answered_and_a_cut_off_run_goes_on(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(generate_answers, "MAX_CONCURRENT_PROMPTS", 2)
    assert generate_answers.main(generation(folder)) == 0
    whole = pq.read_table(folder / "answers.parquet").to_pylist()
    assert len(whole) == 12 and all(len(row["responses"]) == 4 for row in whole)
    assert [row["prompt"] for row in whole] == [
        json.loads(line)["prompt"] for line in (folder / "data" / "train.jsonl").read_text().splitlines()
    ]
    (folder / "answers.parquet").unlink()
    generate, calls = NativeEngine.generate, []

    async def cut(self: NativeEngine, request: GenerationRequest) -> list[Completion]:
        calls.append(request)
        if len(calls) == 7:
            raise WorkerError(0, "generate", "the machine went away")
        return await generate(self, request)

    monkeypatch.setattr(NativeEngine, "generate", cut)
    assert generate_answers.main(generation(folder)) == 2
    journal = folder / "answers.parquet.parts"
    head, *lines = journal.read_text().splitlines()
    assert 4 <= len(lines) <= 6
    lines[0] = lines[0].replace('"responses": ["', '"responses": ["kept ', 1)
    journal.write_text("\n".join([head, *lines, '{"prompt": 11, "respon']))
    before = len(calls)
    assert generate_answers.main(generation(folder)) == 0
    assert len(calls) - before == 12 - len(lines)
    again = pq.read_table(folder / "answers.parquet").to_pylist()
    kept = json.loads(lines[0])["prompt"]
    assert again[kept]["responses"][0].startswith("kept ")
    assert [r for i, r in enumerate(again) if i != kept] == [r for i, r in enumerate(whole) if i != kept]
    assert not list(folder.glob("answers.parquet.*"))


def test_an_interrupt_says_that_the_same_command_goes_on(folder: Path, monkeypatch: Any, capsys: Any):
    async def interrupt(self: NativeEngine, request: GenerationRequest) -> list[Completion]:
        raise KeyboardInterrupt

    monkeypatch.setattr(NativeEngine, "generate", interrupt)
    assert generate_answers.main(generation(folder)) == 130
    assert "the same command goes on" in capsys.readouterr().err


def test_no_column_is_lost_and_what_parquet_cannot_hold_is_said_first(folder: Path, capsys: Any):
    row = {"prompt": "1+1=", "data_source": "x", "reward_model": {"ground_truth": "2"}}
    path = folder / "data" / "train.jsonl"
    path.write_text(json.dumps(row) + "\n" + json.dumps({**row, "level": 3}) + "\n")
    assert generate_answers.main(generation(folder)) == 0
    assert [r["level"] for r in pq.read_table(folder / "answers.parquet").to_pylist()] == [None, 3]
    path.write_text("".join(json.dumps({**row, "level": level}) + "\n" for level in (3, "three")))
    assert generate_answers.main(generation(folder)) == 2
    assert "cannot be written as parquet" in capsys.readouterr().err and not list(folder.glob("*.parts"))
    assert generate_answers.main(generation(folder, f"data.output_path={folder / 'a.jsonl'}")) == 0
    assert [json.loads(line)["level"] for line in (folder / "a.jsonl").read_text().splitlines()] == [3, "three"]


def test_answers_to_parquet_rows_keep_the_types_of_their_columns(tmp_path: Path):
    types = {"prompt": pa.string(), "level": pa.int32(), "score": pa.float32(), "kind": pa.dictionary(pa.int8(), "str")}
    types |= {"extra": pa.map_("str", pa.int16()), "when": pa.timestamp("ns"), "void": pa.null()}
    row = {"prompt": "1+1=", "level": 3, "score": 0.5, "kind": "a", "extra": [("x", 1)], "when": 1, "void": None}
    table = pa.table({name: pa.array([row[name]] * 3, kind) for name, kind in types.items()}).replace_schema_metadata(
        {"x": "y"}
    )
    pq.write_table(table, tmp_path / "rows.parquet")
    rows = FileRows([tmp_path / "rows.parquet"])
    generate_answers.write_answers(rows, [0, 2], {"responses": [["2"], ["3", "4"]]}, tmp_path / "answers.parquet")
    written = pq.read_table(tmp_path / "answers.parquet")
    assert written.drop_columns(["responses"]).schema.equals(rows.arrow_table().schema, check_metadata=True)
    assert written.drop_columns(["responses"]).to_pylist() == [rows[0], rows[2]]
    assert written["responses"].to_pylist() == [["2"], ["3", "4"]]


class Twice(AgentLoopBase):
    async def run(self, sampling_params: dict[str, Any], **row: Any) -> AgentLoopOutput:
        ids = self.tokenizer(row["raw_prompt"][0]["content"])["input_ids"]
        first = await self.server_manager.generate(
            "x", prompt_ids=ids, sampling_params={"max_tokens": 1, "ignore_eos": True}
        )
        second = await self.server_manager.generate("x", prompt_ids=ids, sampling_params={"stop_token_ids": [0]})
        made = [*first.token_ids, *second.token_ids]
        return AgentLoopOutput(ids, made, [1] * len(made), num_turns=2)


def test_files_are_answered_by_the_loop_their_rows_name_and_keys_without_effect_are_named(folder: Path, capsys: Any):
    (folder / "loops.yaml").write_text(f"- name: twice\n  _target_: {__name__}.Twice\n")
    loops = f"{ARR}.rollout.agent.agent_loop_config_path={folder / 'loops.yaml'}"
    path = folder / "data" / "train.jsonl"
    path.write_text("".join(json.dumps({**json.loads(r), "agent_name": "twice"}) + "\n" for r in path.open()))
    assert generate_answers.main(generation(folder, loops, "trainer.total_epochs=3")) == 0
    assert all(len(row["responses"]) == 4 for row in pq.read_table(folder / "answers.parquet").to_pylist())
    assert "warning: trainer.total_epochs was set, but nothing reads it here" in capsys.readouterr().err
    path.write_text(path.read_text().replace("twice", "thrice"))
    assert generate_answers.main(generation(folder, loops)) == 2
    assert "unknown agent loop 'thrice'" in capsys.readouterr().err


def test_answers_of_another_run_are_not_continued(folder: Path, capsys: pytest.CaptureFixture[str]):
    begun = generation(folder, f"{ARR}.rollout.stop_token_ids=[3]")
    config = load_config(begun)
    prompts = train_prompts(config.data, load_tokenizer(config.actor_rollout_ref.model))
    sampling = training_sampling(config.actor_rollout_ref.rollout)
    journal = folder / "answers.parquet.parts"
    generate_answers.resume_journal(journal, {"prompts": "others"})
    generate_answers.resume_journal(
        journal, run_fingerprint(config, prompts, sampling)
    )  # nothing was answered: nothing is lost
    journal.write_text(journal.read_text() + '{"prompt": 0, "responses": []}\n')
    assert generate_answers.main(generation(folder)) == 2
    assert "holds answers of another run (sampling differs" in capsys.readouterr().err
    assert generate_answers.main([a for a in generation(folder) if "output_path" not in a]) == 2
    assert "data.output_path is not set" in capsys.readouterr().err


def test_figures_of_a_file_of_answers(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    rows = [
        {"data_source": "a", "reward_model": {"ground_truth": "1"}, "responses": ["1", "1", "2", "3"]},
        {"data_source": "a", "reward_model": {"ground_truth": "1"}, "responses": ["2", "2", "1", "3"]},
        {"data_source": "b", "reward_model": {"ground_truth": "5"}, "responses": ["5", "5", "5", "5"]},
    ]
    (tmp_path / "answers.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "own.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    right = float(solution_str == ground_truth)\n"
        "    return {'score': right, 'acc': right, 'pred': solution_str}\n"
    )
    given = [f"data.path={tmp_path / 'answers.jsonl'}", f"custom_reward_function.path={tmp_path / 'own.py'}"]
    figures = score_answers.print_scores(load_config(given, config_name="evaluation"))
    assert figures["accuracy/a"] == pytest.approx(3 / 8) and figures["accuracy/b"] == 1
    assert figures["pass@2/a"] == pytest.approx((5 / 6 + 3 / 6) / 2) and figures["pass@4/a"] == 1
    assert figures["maj@4/a"] == pytest.approx(0.5)
    last = capsys.readouterr().out.strip().splitlines()[-1]
    assert json.loads(last) == {"test_score/a": pytest.approx(3 / 8), "test_score/b": 1.0}
    assert score_answers.main([]) == 2 and score_answers.main(["data.path=nowhere.parquet"]) == 2


OWN = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    if solution_str == "?":
        raise ValueError("unreadable")
    return {"score": float(solution_str == ground_truth), "pred": solution_str}
"""


def evaluate_rows(folder: Path, *rows: dict[str, Any], key: str = "reward.custom_reward_function") -> dict[str, float]:
    given = {"data_source": "a", "reward_model": {"ground_truth": "1"}}
    (folder / "answers.jsonl").write_text("".join(json.dumps({**given, **row}) + "\n" for row in rows))
    (folder / "own.py").write_text(OWN)
    words = [f"data.path={folder / 'answers.jsonl'}", f"{key}.path={folder / 'own.py'}", "reward.on_error=count"]
    return score_answers.print_scores(load_config(words, config_name="evaluation"))


def test_the_table_of_figures_cuts_no_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    source = "openai/gsm8k-" + "x" * 90
    evaluate_rows(tmp_path, {"responses": ["1", "1"], "data_source": source}, {"responses": ["1", "2"]})
    table = capsys.readouterr().out
    assert table.count(f" {source} ") == 4 and "95 % interval" in table and "…" not in table


def test_answers_without_a_score_are_left_out_of_every_figure(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    rows = [{"responses": ["?", "?"]}, {"responses": ["1", "1", "2"]}, {"responses": ["2", "2", "?"]}]
    figures = evaluate_rows(tmp_path, *rows)
    assert figures["test_score/a"] == figures["mean score/a"] == figures["accuracy/a"] == pytest.approx(1 / 3)
    assert figures["pass@2/a"] == figures["maj@2/a"] == 0.5
    assert "3 answers were not scored" in capsys.readouterr().out
    evaluate_rows(tmp_path, {"responses": "?"})
    assert json.loads(capsys.readouterr().out.strip().splitlines()[-1]) == {"test_score/a": None}


def test_as_many_answers_vote_for_every_prompt_as_the_figure_says(tmp_path: Path):
    assert evaluate_rows(tmp_path, {"responses": ["1", "1"]}, {"responses": ["2", "1", "1", "1"]})["maj@2/a"] == 0.5


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"responses": []}, "line 1: responses must be a text or a list of texts"),
        ({"responses": ["1", None]}, "line 1: responses must be a text or a list of texts"),
        ({"responses": 3}, "line 1: responses must be a text or a list of texts, found 3"),
        ({"responses": "1", "reward_model": "1"}, "line 1: reward_model must hold ground_truth"),
        ({"responses": "1", "reward_model": {}}, "line 1: reward_model must hold ground_truth"),
        ({"responses": "1", "extra_info": "x"}, "extra_info be an object"),
        ({"responses": "1", "prompt": [{"role": "bot"}]}, "line 1: prompt: message 0 has role 'bot'"),
    ],
)
def test_odd_files_of_answers_are_refused_with_the_row(tmp_path: Path, row: dict[str, Any], says: str):
    with pytest.raises(DataError, match=re.escape(says)):
        evaluate_rows(tmp_path, row)


def test_intervals_are_wilsons_for_right_and_wrong_and_narrower_where_prompts_agree():
    _, value, low, high = proportion("x", [1.0] * 8 + [0.0] * 2)
    assert (value, low, high) == (0.8, pytest.approx(0.4902, abs=1e-4), pytest.approx(0.9433, abs=1e-4))
    assert proportion("x", [1.0] * 5)[2:] == (pytest.approx(0.5655, abs=1e-4), pytest.approx(1.0))
    agreed = proportion("x", [0.75, 0.85] * 5)
    assert 0.75 < agreed[2] < 0.8 < agreed[3] < 0.85


def test_pass_at_k_is_the_share_of_draws_with_a_right_answer():
    for n, right, k in ((4, 2, 2), (6, 1, 3), (5, 0, 2), (5, 4, 2)):
        draws = list(itertools.combinations([True] * right + [False] * (n - right), k))
        assert pass_at(k, n, right) == pytest.approx(sum(map(any, draws)) / len(draws))
    assert majority([]) is None


@pytest.fixture
def address(folder: Path) -> Iterator[str]:
    config = load_config(generation(folder))
    tokenizer = load_tokenizer(config.actor_rollout_ref.model)
    server = OpenAIServer(build_standalone_engine(config, tokenizer), tokenizer, "small", 16)
    with serving(server) as address:
        yield address


def test_the_official_client_talks_to_the_server(address: str):
    client = openai.OpenAI(base_url=address, api_key="none", max_retries=0)
    assert [model.id for model in client.models.list()] == ["small"]
    chat = client.chat.completions.create(
        model="small", messages=[{"role": "user", "content": "12+13="}], n=3, max_tokens=6, seed=1, logprobs=True
    )
    assert len(chat.choices) == 3 and chat.usage.prompt_tokens == 6 and chat.usage.completion_tokens <= 18
    assert all(c.finish_reason in ("stop", "length") for c in chat.choices)
    assert all(v.logprob <= 0 for v in chat.choices[0].logprobs.content)
    again = client.chat.completions.create(
        model="small", messages=[{"role": "user", "content": "12+13="}], max_tokens=6, temperature=0
    )
    plain = client.completions.create(model="small", prompt=["12+13=", "11+11="], max_tokens=6, temperature=0)
    assert plain.choices[0].text == again.choices[0].message.content and len(plain.choices) == 2
    pieces = client.chat.completions.create(
        model="small", messages=[{"role": "user", "content": "12+13="}], max_tokens=6, temperature=0, stream=True
    )
    assert "".join(p.choices[0].delta.content or "" for p in pieces) == again.choices[0].message.content
    with pytest.raises(openai.BadRequestError, match="exceed the 16"):
        client.completions.create(model="small", prompt="1" * 12, max_tokens=6)
    with pytest.raises(openai.BadRequestError, match="temperature must be a number"):
        client.completions.create(model="small", prompt="1", extra_body={"temperature": "hot"})
    with pytest.raises(openai.BadRequestError, match=r"logit_bias \{1000000: 5.0\} must give token ids in 0 to"):
        client.completions.create(model="small", prompt="1", max_tokens=2, logit_bias={"1000000": 5})
    client.completions.create(model="small", prompt="1", max_tokens=2, presence_penalty=0, echo=False)


def post(address: str, path: str, data: bytes) -> tuple[int, str]:
    request = urllib.request.Request(f"{address}/{path}", data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as reply:
            return reply.status, reply.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("{", "the body is not valid JSON"),
        ("[" * 100_000, "the body is not valid JSON"),
        ('{"prompt": "\\ud800"}', "the body is not valid JSON"),
        ("[1]", "must be a JSON object"),
        ('{"prompt": [1, 1000000], "max_tokens": 2}', "token id 1000000 of the prompt is not in 0 to"),
        ('{"prompt": [true]}', "prompt must be a text, token ids"),
        ('{"prompt": "1", "temperature": NaN}', "temperature must be a number, found nan"),
        ('{"prompt": "1", "temperature": 1e-300}', "temperature=1e-300 0 or in"),
        ('{"prompt": "1", "max_tokens": 0}', "max_tokens must be a whole number"),
        ('{"prompt": "1", "max_tokens": "abc"}', "max_tokens must be a whole number"),
        ('{"prompt": "1", "n": 1.5}', "n must be a whole number of at most 1024"),
        ('{"prompt": "1", "seed": [1]}', "seed must be a whole number"),
        ('{"prompt": "1", "top_k": 10000000000}', "top_k must be a whole number"),
        ('{"prompt": "1", "stop": 5}', "stop must be a text or a list of texts (1 to 4096 characters"),
        ('{"prompt": "1", "stop_token_ids": 5}', "stop_token_ids must be a list of token ids"),
        ('{"prompt": "1", "stream": "yes"}', "stream must be true or false"),
        ('{"prompt": "1", "stream": true, "stream_options": "x"}', "stream_options must be an object"),
        ('{"prompt": "1", "logprobs": 21}', "logprobs must be a whole number of at most 20"),
        ('{"prompt": "1", "min_p": 1.1}', "min_p must be a number from 0 to 1"),
        ('{"prompt": "1", "logit_bias": {"3": 101}}', "each with a number from -100 to 100"),
        ('{"prompt": "1", "logit_bias": {"x": 1}}', "logit_bias must be an object such as"),
        ('{"prompt": "1", "stop_token_ids": [99999], "max_tokens": 2}', "stop_token_ids=[99999] must be in 0 to"),
        (
            '{"prompt": "1", "response_format": {"type": "json_object"}}',
            "response_format: this server's",
        ),
        ('{"prompt": "1", "guided_regex": "a+"}', "guided_regex is not supported here"),
        ('{"messages": [{"role": "bot", "content": "x"}]}', "message 0 has role 'bot'"),
        ('{"messages": [{"role": "user", "content": "1"}], "chat_template_kwargs": {"tokenize": true}}', "tokenize"),
    ],
)
def test_a_body_that_cannot_be_answered_is_the_clients_mistake(address: str, body: str, says: str):
    code, text = post(address, "chat/completions" if "messages" in body else "completions", body.encode())
    assert code == 400 and says in json.loads(text)["error"]["message"]


def test_an_address_that_cannot_be_listened_on_is_said(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        words = [f"model={folder / 'model'}", "--port", str(port), "rollout.prompt_length=5000"]
        assert command.main(words) == 2
        early = capsys.readouterr()
        monkeypatch.setattr(command, "check_address", lambda host, port: None)  # free then, and taken by now
        assert command.main(words) == 2
    late = capsys.readouterr()
    reason = f"cannot listen on --host 127.0.0.1 --port {port}"
    assert not early.out and reason in early.err and reason in late.err
    positions = json.loads((folder / "model" / "config.json").read_text())["max_position_embeddings"]
    assert positions < 5000 and f"at most {positions} tokens a conversation" in late.out


def test_a_server_before_another_needs_the_tokenizer_alone(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    for file in (folder / "model").glob("*token*"):
        shutil.copy(file, tmp_path)
    other = ["rollout.name=tgi", "rollout.server.url=http://127.0.0.1:9", "rollout.response_length=8"]
    monkeypatch.setattr(command, "check_address", lambda host, port: None)
    assert command.main([f"model={tmp_path}", "--port", "70000", *other]) == 2
    said = capsys.readouterr()
    assert "at most 520 tokens a conversation" in said.out and "a port is a number from 0 to 65535" in said.err


def test_a_server_without_a_model_is_a_mistake():
    assert command.main([]) == 2


def test_what_a_request_does_not_say_is_as_the_configuration_says(folder: Path):
    rollout = [f"{ARR}.rollout.do_sample=False", f"{ARR}.rollout.stop=[eos]", "data.max_response_length=64"]
    config = load_config(generation(folder, *rollout))
    tokenizer = load_tokenizer(config.actor_rollout_ref.model)
    sampling = training_sampling(config.actor_rollout_ref.rollout)
    server = OpenAIServer(build_standalone_engine(config, tokenizer), tokenizer, "small", 72, sampling)
    first = server.read_request({}, [1, 2])
    assert first.sampling == replace(sampling, n=1, max_tokens=64) and first.sampling.temperature == 0
    assert server.read_request({}, [1] * 20).sampling.max_tokens == 52  # what is left
    asked = server.read_request({"temperature": 0.5, "stop": "x", "min_tokens": 3, "ignore_eos": True, "seed": 9}, [1])
    assert asked.sampling == replace(
        sampling, n=1, max_tokens=64, temperature=0.5, stop=("x",), min_tokens=3, ignore_eos=True, seed=9
    )


def test_our_client_of_openai_servers_gets_ids_and_logprobs_from_ours(folder: Path, address: str):
    config = load_config(generation(folder, f"{ARR}.rollout.name=tgi", f"{ARR}.rollout.server.url={address[:-3]}"))
    tokenizer = load_tokenizer(config.actor_rollout_ref.model)
    client = build_standalone_engine(config, tokenizer)
    request = GenerationRequest(0, tokenizer("12+13=")["input_ids"], SamplingParams(n=3, max_tokens=8, ignore_eos=True))
    completions = asyncio.run(client.generate(request))
    assert [len(c.token_ids) for c in completions] == [8] * 3
    assert all(v < 0 for c in completions for v in c.logprobs)
