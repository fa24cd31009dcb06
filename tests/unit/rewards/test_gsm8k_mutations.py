"""Every gold answer of the GSM8K test set in ten spoilt forms, against what the written rule says of each."""

import json

import pytest

from verl.rewards.scorers.gsm8k import compute_score

WIDE = {ord(ascii): chr(ord(ascii) + 0xFEE0) for ascii in "0123456789,.-"}


def mutations(gold: int) -> list[tuple[str, str, bool]]:
    """(kind, answer, whether the rule of docs/rewards/scorers.md says that it is right), `gold` not 0."""
    other = gold + 1
    return [
        ("wrong number", f"#### {other}", False),
        ("wrong number", f"#### {gold}{gold % 10}", False),
        ("wrong place", f"The answer is {gold}.\n#### {other}", False),
        ("wrong place", f"The answer is {gold}.", False),
        ("wrong place", f"{gold} ####", False),
        ("units", f"#### {gold} dollars", True),
        ("units", f"#### ${gold}", True),
        ("units", f"#### {gold}%", True),
        ("units", f"#### {other} dollars", False),
        ("thousands separators", f"#### {gold:,}", True),
        ("thousands separators", f"#### {other:,}", False),
        ("decimals", f"#### {gold}.00", True),
        ("decimals", f"#### {gold}.", True),
        ("decimals", f"#### {gold}.5", False),
        ("decimals", f"#### {gold}.01", False),
        ("negatives", f"#### {-gold}", False),
        ("negatives", f"#### \u2212{abs(gold)}", gold < 0),
        ("two answers", f"#### {other}\n#### {gold}", True),
        ("two answers", f"#### {gold}\n#### {other}", False),
        ("two answers", f"#### {other} or {gold}", False),
        ("two answers", f"#### {gold}/{other}", False),
        ("two answers", f"#### {gold} + {other}", False),
        ("trailing words", f"#### {gold} is the answer, not {other}.", True),
        ("trailing words", f"#### {gold}. I am sure!", True),
        ("trailing words", f"#### about {gold}", False),
        ("full-width digits", f"#### {str(gold).translate(WIDE)}", True),
        ("full-width digits", "#### " + f"{gold:,}".translate(WIDE), True),
        ("full-width digits", f"#### {str(other).translate(WIDE)}", False),
        ("boxed", rf"#### \boxed{{{gold}}}", True),
        ("boxed", rf"#### $\boxed{{{gold:,}}}$", True),
        ("boxed", rf"#### \boxed{{{other}}}", False),
        ("boxed", rf"\boxed{{{gold}}}", False),
    ]


def golds(folder) -> list[tuple[str, str]]:
    rows = [json.loads(line)["answer"] for line in (folder / "gsm8k" / "test.jsonl").read_text().splitlines()]
    return [(row, row.rpartition("####")[2].strip()) for row in rows]


def test_all_gold_answers_are_right(test_data):
    rows = golds(test_data)
    assert len(rows) == 1319
    assert [row for row, gold in rows if compute_score(row, gold) != 1.0] == []


def test_no_mutation_of_a_gold_answer_is_judged_against_the_rule(test_data):
    judged, wrong = 0, []
    for _, gold in golds(test_data):
        for kind, answer, right in mutations(int(gold.replace(",", ""))):
            judged += 1
            if compute_score(answer, gold) != float(right):
                wrong.append((kind, answer, gold))
    assert judged == 1319 * 32 and wrong == []


def test_there_are_ten_kinds_of_mutations():
    assert len({kind for kind, _, _ in mutations(5)}) == 10


@pytest.mark.parametrize("gold", [1319, 7, -3])
def test_the_flexible_method_reads_the_last_number(gold):
    assert compute_score(f"it is {gold}.", str(gold), method="flexible") == 1.0
    assert compute_score(f"it is {gold}, not 99.", str(gold), method="flexible") == 0.0
    assert compute_score(f"#### {gold}\nthat took 99 words", str(gold), method="flexible") == 0.0
