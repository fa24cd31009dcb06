"""Prompt rows from files: checks, lengths, selection."""

import json

import pytest
from test_chat import TEMPLATE, char_tokenizer
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from verl.config import CustomClassConfig, DataConfig
from verl.data.prompts import load_prompts, train_prompts, truncate, validation_prompts
from verl.utils.errors import ConfigError, DataError

OVERHEAD = len("<user><assistant>")


def row(content="hi", **changes):
    made = {
        "data_source": "toy",
        "prompt": [{"role": "user", "content": content}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "4"},
        "extra_info": {"index": 3},
    }
    return {key: value for key, value in {**made, **changes}.items() if value is not ...}


def write(path, rows):
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return str(path)


@pytest.fixture
def load(tmp_path):
    def load(rows, max_samples=-1, **settings):
        path = write(tmp_path / "rows.jsonl", rows)
        config = DataConfig(**{"max_prompt_length": OVERHEAD + 10, "shuffle": False, **settings})
        return load_prompts(path, config, char_tokenizer(TEMPLATE), max_samples)

    return load


def contents(dataset):
    return [prompt.messages[0]["content"] for prompt in dataset]


def test_a_prompt_carries_everything_the_run_reads(load, tmp_path):
    prompt = load([row("a"), row("hi", agent_name="single_turn_agent", colour="red")])[1]
    assert prompt.index == 1 and prompt.location == f"{tmp_path / 'rows.jsonl'} line 2"
    assert prompt.text == "<user>hi<assistant>" and len(prompt.prompt_ids) == len(prompt.text)
    assert (prompt.data_source, prompt.ground_truth, prompt.extra_info) == ("toy", "4", {"index": 3})
    assert prompt.agent_name == "single_turn_agent" and prompt.columns["colour"] == "red"
    assert not prompt.truncated


@pytest.mark.parametrize(
    ("by_key", "of_row", "tools", "is_said"),
    [
        (True, None, None, True),
        (False, True, {}, True),
        (False, True, {"search": None}, True),  # parquet fills the tools of other rows with null
        (True, False, None, False),
        (True, None, {"search": {"create_kwargs": {"k": 3}}}, False),
        (False, None, None, False),
    ],
)
def test_rows_that_need_tools_and_name_none_are_counted(load, caplog, by_key, of_row, tools, is_said):
    extra = {"need_tools_kwargs": of_row, "tools_kwargs": tools}
    load([row(), row(extra_info=extra), row(extra_info=extra)][1:], need_tools_kwargs=by_key)
    said = [r.message for r in caplog.records if "2 rows need the arguments of tools" in r.message]
    assert bool(said) == is_said and (not said or "rows.jsonl line 1" in said[0])


def test_columns_may_have_other_names(load):
    renamed = {**row(), "question": "2+2", "source": "mine"}
    prompt = load([renamed], prompt_key="question", reward_fn_key="source")[0]
    assert prompt.messages[0]["content"] == "2+2" and prompt.data_source == "mine"


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (row(prompt=...), "there is no column 'prompt': set data.prompt_key=COLUMN, one of ability, data_source"),
        (row(prompt=None), "column 'prompt' is null"),
        (row(" "), "column 'prompt': the prompt is empty"),
        (row(prompt=[{"role": "bot", "content": "x"}]), "column 'prompt': message 0 has role 'bot'"),
        (row(data_source=...), "there is no column 'data_source'"),
        (row(data_source=5), "column 'data_source' is int, expected str"),
        (row(reward_model=...), "there is no column 'reward_model'"),
        (row(reward_model="4"), "column 'reward_model' is str, expected mapping"),
        (row(reward_model={"style": "rule"}), "has no ground_truth"),
        (row(extra_info=[1]), "column 'extra_info' is list"),
        (row(images=["a.png"]), "column 'images' holds media"),
    ],
)
def test_a_broken_row_is_refused_at_once_with_file_and_row(load, tmp_path, broken, message):
    with pytest.raises(DataError, match=message) as error:
        load([row(), row(), broken])
    assert f"{tmp_path / 'rows.jsonl'} line 3" in str(error.value)


def test_rows_scored_by_a_model_need_no_ground_truth_and_extra_info_is_optional(load):
    prompt = load([row(reward_model={"style": "model"}, extra_info=..., images=[])])[0]
    assert prompt.ground_truth is None and prompt.extra_info == {}


def test_a_template_that_refuses_a_prompt_names_the_row(tmp_path):
    path = write(tmp_path / "rows.jsonl", [row()])
    tokenizer = char_tokenizer("{{ raise_exception('no users here') }}")
    with pytest.raises(DataError, match="line 1: the chat template refuses the prompt: no users here"):
        load_prompts(path, DataConfig(), tokenizer)


LONG = "0123456789" + "abcde"


def test_overlong_prompts_are_refused_before_the_run_by_default(load):
    with pytest.raises(DataError) as error:
        load([row("short"), row(LONG), row(LONG + "x")])
    for part in ("2 of 3 prompts", f"max_prompt_length={OVERHEAD + 10}", "line 2 with 32", "the longest has 33"):
        assert part in str(error.value)


def test_a_prompt_of_exactly_the_limit_is_kept_whole(load):
    prompt = load([row("0123456789")])[0]
    assert len(prompt.prompt_ids) == OVERHEAD + 10 and not prompt.truncated


@pytest.mark.parametrize("text", [LONG, "é" * 11])
def test_overlong_prompts_are_removed_and_counted_when_filtering(load, text, caplog):
    dataset = load([row("a"), row(text), row("b"), row("0123456789")], filter_overlong_prompts=True)
    assert dataset.summary.line() in caplog.text
    assert contents(dataset) == ["a", "b", "0123456789"]
    assert [prompt.index for prompt in dataset] == [0, 2, 3]  # numbers of the file, not of what is left
    assert (dataset.summary.num_overlong, dataset.summary.num_kept) == (1, 3)
    assert f"1 longer than data.max_prompt_length={OVERHEAD + 10} removed" in dataset.summary.line()


def test_short_texts_of_many_tokens_are_measured_by_tokens(tmp_path):
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(sorted(alphabet))}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    byte_tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=TEMPLATE)
    path = write(tmp_path / "rows.jsonl", [row("\u6f22" * 6)])  # six characters, eighteen bytes
    with pytest.raises(DataError, match=f"line 1 with {OVERHEAD + 18}"):
        load_prompts(path, DataConfig(max_prompt_length=OVERHEAD + 17), byte_tokenizer)


@pytest.mark.parametrize(
    ("side", "expected"),
    [
        ("left", ">0123456789abcde<assistant>"),
        ("right", "<user>0123456789abcde<assis"),
        ("middle", "<user>0123456" + "cde<assistant>"),
    ],
)
def test_overlong_prompts_are_shortened_on_the_side_asked_for_and_counted(load, side, expected):
    dataset = load([row("a"), row(LONG)], truncation=side)
    tokenizer = char_tokenizer(TEMPLATE)
    assert len(expected) == OVERHEAD + 10
    assert "".join(tokenizer.convert_ids_to_tokens(dataset[1].prompt_ids)) == expected
    assert dataset[1].truncated and not dataset[0].truncated
    assert dataset.summary.num_overlong == 1 and f"truncated ({side})" in dataset.summary.line()


@pytest.mark.parametrize("limit", [1, 2, 5, 7])
def test_truncation_keeps_exactly_the_limit(limit):
    for side in ("left", "right", "middle"):
        assert len(truncate(list(range(8)), limit, side)) == limit


def test_no_prompt_left_is_an_error_not_an_empty_run(load):
    with pytest.raises(DataError, match="no prompts are left"):
        load([row(LONG)], filter_overlong_prompts=True)


def test_max_samples_takes_the_first_rows_in_order_or_a_seeded_draw(load):
    rows = [row(str(i)) for i in range(10)]
    assert contents(load(rows, max_samples=3)) == ["0", "1", "2"]
    assert len(load(rows, max_samples=99)) == 10
    drawn = [contents(load(rows, max_samples=5, shuffle=True, seed=seed)) for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert len(set(drawn[0])) == 5 and drawn[0] == sorted(drawn[0])
    with pytest.raises(ConfigError, match="found 0"):
        load(rows, max_samples=0)


def test_train_and_validation_use_their_own_files_and_limits(tmp_path):
    train, val = (write(tmp_path / f"{n}.jsonl", [row(n + str(i)) for i in range(3)]) for n in ("t", "v"))
    config = DataConfig(train_files=[train], val_files=val, train_max_samples=2, shuffle=False)
    tokenizer = char_tokenizer(TEMPLATE)
    assert contents(train_prompts(config, tokenizer)) == ["t0", "t1"]
    assert contents(validation_prompts(config, tokenizer)) == ["v0", "v1", "v2"]


def test_validation_order_is_file_order_unless_shuffling_is_asked_for(tmp_path):
    val = write(tmp_path / "v.jsonl", [row(str(i)) for i in range(20)])
    tokenizer, in_order = char_tokenizer(TEMPLATE), [str(i) for i in range(20)]
    assert contents(validation_prompts(DataConfig(val_files=val), tokenizer)) == in_order
    shuffled = contents(validation_prompts(DataConfig(val_files=val, validation_shuffle=True), tokenizer))
    assert shuffled != in_order and sorted(shuffled, key=int) == in_order


def test_a_dataset_class_of_the_users_own_provides_the_rows(tmp_path):
    (tmp_path / "mine.py").write_text(
        "from torch.utils.data import Dataset\n"
        "class Mine(Dataset):\n"
        "    def __init__(self, data_files, tokenizer, config, processor=None, max_samples=-1):\n"
        "        self.items = [{'raw_prompt': f, 'data_source': config.get('prompt_key'),\n"
        "                       'reward_model': {'ground_truth': max_samples}} for f in data_files]\n"
        "    def __len__(self): return len(self.items)\n"
        "    def __getitem__(self, i): return self.items[i]\n"
    )
    config = DataConfig(custom_cls=CustomClassConfig(path=str(tmp_path / "mine.py"), name="Mine"))
    dataset = load_prompts(["f1", "f2"], config, char_tokenizer(TEMPLATE), max_samples=7)
    assert contents(dataset) == ["f1", "f2"]
    assert dataset[0].ground_truth == 7 and dataset[0].data_source == "prompt"
    assert dataset[1].location == "Mine item 1"
    wrong = DataConfig(custom_cls=CustomClassConfig(path=str(tmp_path / "mine.py"), name="Mien"))
    with pytest.raises(ConfigError, match=r"data.custom_cls.name='Mien' is not defined.* did you mean 'Mine'"):
        load_prompts(["f1"], wrong, char_tokenizer(TEMPLATE))


def test_a_template_that_drops_the_messages_is_refused(tmp_path):
    path, config = write(tmp_path / "rows.jsonl", [row("a"), row("b"), row("a")]), DataConfig(max_prompt_length=40)
    for template in ("always the same", "{% for m in message %}{{ m['content'] }}{% endfor %}same"):
        with pytest.raises(DataError, match=r"same prompt of all 3 rows, '.*same', though their messages differ"):
            load_prompts(path, config, char_tokenizer(template))
    same = write(tmp_path / "same.jsonl", [row("a"), row("a")])
    assert len(load_prompts(same, config, char_tokenizer(TEMPLATE))) == 2
    mostly = "{% if messages[0]['content'] == 'b' %}b{% else %}a{% endif %}"
    assert len(load_prompts(path, config, char_tokenizer(mostly))) == 3
