"""Scorers by their import paths, with the arguments that published reward functions give and what they expect back."""

import json

import pytest

from verl.utils.reward_score import (
    geo3k,
    gsm8k,
    math_dapo,
    math_verify,
    prime_code,
    prime_math,
    sandbox_fusion,
    search_r1_like_qa_em,
)
from verl.utils.reward_score.prime_code import utils as prime_code_utils
from verl.utils.reward_score.sandbox_fusion import utils as sandbox_fusion_utils

DOUBLE = "```python\nprint(int(input()) * 2)\n```"


@pytest.mark.parametrize(
    ("text", "strict", "flexible"),
    [
        ("It costs 3.\n#### 1,234.50", "1234.50", "1234.50"),
        ("#### $18", "18", "18"),
        ("#### -5 of 7", "-5", "7"),
        ("#### -$5.", "-5", "-5"),
        ("3 - 2 is 1.", None, "1"),
        ("from 3-5", None, "5"),
        ("#### 4 and #### 05", "05", "05"),
        ("none", None, None),
        ("#### 7" + "x" * 300, None, None),
    ],
)
def test_gsm8k_reads_the_number_as_it_is_written(text, strict, flexible):
    assert gsm8k.extract_solution(solution_str=text) == strict
    assert gsm8k.extract_solution(solution_str=text, method="flexible") == flexible


def test_gsm8k_scores_by_name_and_refuses_another_method():
    assert (
        gsm8k.compute_score(solution_str="#### 5", ground_truth="4", method="strict", format_score=0.1, score=2) == 0.1
    )
    with pytest.raises(ValueError, match="'loose'; allowed: strict, flexible"):
        gsm8k.extract_solution("#### 5", "loose")


def test_math_dapo_reads_the_answer_after_its_word_or_a_box_near_the_end():
    assert math_dapo.last_boxed_only_string(r"a \boxed{1} b \boxed{2}") == r"\boxed{2}"
    assert math_dapo.remove_boxed(r"\boxed{2}") == "2" and math_dapo.normalize_final_answer(r" \$ 1,000 ") == "1,000"
    assert math_dapo.is_correct_minerva("Answer: 4\nAnswer: 0.5", r"\frac12") == (True, "0.5")
    assert math_dapo.is_correct_minerva("no", "4") == (False, "[INVALID]")
    assert math_dapo.is_correct_minerva("x = 7", r"so \boxed{7}", gt_need_extract=True, answer_pattern=r"x = (\d+)")[0]
    assert math_dapo.is_correct_strict_box(r"\boxed{3}" + " " * 50, "3") == (1, "3")
    assert math_dapo.is_correct_strict_box(r"\boxed{3}" + " " * 100, "3") == (-1, None)
    assert math_dapo.is_correct_strict_box(r"\boxed{3}" + " " * 100, "3", pause_tokens_index=[0, 60]) == (1, "3")
    assert math_dapo.verify(r"\boxed{3}", "3", strict_box_verify=True, pause_tokens_index=None) == (True, "3")
    assert math_dapo.verify("Answer: 3", "3") == (True, "3")


def test_math_dapo_scores_the_last_300_characters():
    for text, score in (("Answer: 3", 1.0), ("Answer: 4", -1.0), ("Answer: 3" + "." * 300, -1.0)):
        found = math_dapo.compute_score(text, "3", strict_box_verify=False, pause_tokens_index=None)
        assert (found["score"], found["acc"]) == (score, score == 1.0) and "pred" in found


def test_mathematical_scorers_take_the_names_of_their_arguments():
    assert math_verify.compute_score(model_output="it is $0.5$", ground_truth="1/2", timeout_score=0, timeout=30.0) == 1
    assert prime_math.compute_score(model_output=r"\boxed{0.5}", ground_truth=r"\frac12") == (True, True, "0.5")
    assert prime_math.compute_score("the answer is 3", "4") == (False, False, "3")
    right, wrong = r"<think>a</think> \boxed{4}", r"\boxed{5}"
    assert geo3k.compute_score(predict_str=right, ground_truth="4", use_boxed=True, format_score=0.1) == 1.0
    assert (geo3k.acc_reward(right, "4"), geo3k.acc_reward(wrong, "4")) == (1.0, 0.0)
    assert (geo3k.format_reward(right), geo3k.format_reward(wrong)) == (1.0, 0.0)
    assert geo3k.acc_reward("<think>a</think>4", "4", use_boxed=False) == 1.0


def test_answers_by_search_are_equal_or_contain_the_target():
    truth = {"target": ["The Eiffel Tower", "a tower!"]}
    assert search_r1_like_qa_em.normalize_answer("The  Tower!") == "tower"
    assert search_r1_like_qa_em.em_check("eiffel tower", truth["target"]) == 1
    assert search_r1_like_qa_em.em_check("the old eiffel tower", "eiffel tower") == 0
    assert search_r1_like_qa_em.subem_check("the old eiffel tower", "Eiffel Tower") == 1
    assert (
        search_r1_like_qa_em.em_check("a", ["the", "cat"])
        == search_r1_like_qa_em.subem_check("dog", ["the", "cat"])
        == 0
    )
    text = "<answer>x</answer> no: <answer> old Eiffel Tower </answer>"
    assert search_r1_like_qa_em.extract_solution(solution_str=text) == "old Eiffel Tower"
    assert search_r1_like_qa_em.extract_solution("none") is None
    scores = search_r1_like_qa_em.compute_score, search_r1_like_qa_em.compute_score_subem
    assert [score(text, truth, method="strict", format_score=0.1, score=2.0) for score in scores] == [0.1, 2.0]
    assert [score("none", truth, format_score=0.1) for score in scores] == [0.0, 0.0]


def test_programs_score_all_or_the_share_of_the_first_ten_tests():
    cases = {"inputs": [str(n) for n in range(12)], "outputs": [str(2 * n) for n in range(11)] + ["0"]}
    score, known = prime_code.compute_score(completion=DOUBLE, test_cases=cases)
    assert score == 0.0 and [one["status"] for one in known] == ["success"] * 11 + ["wrong_answer"]
    score, known = prime_code.compute_score("print(int(input()) * 2)", json.dumps(cases), continuous=True)
    assert score == 1.0 and len(known) == 10
    cases["outputs"][3] = "?"
    assert prime_code.compute_score(DOUBLE, cases, continuous=True)[0] == 0.9
    assert prime_code.compute_score(DOUBLE, {"inputs": ["1"], "outputs": ["2"]})[0] == 1.0


def test_each_test_of_a_program_has_a_result():
    program = "n = int(input())\nif n == 2: raise ValueError('two')\nwhile n == 3: pass\nprint(2 * n)"
    cases = {"inputs": ["1", "1", "2", "3"], "outputs": ["2", "3", "4", "6"]}
    results, known = prime_code_utils.check_correctness(in_outs=cases, generation=program, timeout=1, debug=False)
    assert results == [True, False, -2, -3] and [one["case_index"] for one in known] == [0, 1, 2, 3]
    assert "ValueError: two" in known[2]["stderr"] and known[0]["stdout"] == "2\n" and known[3]["status"] == "timeout"


def test_programs_without_a_server_run_in_our_sandbox_and_need_a_block():
    cases = {"inputs": ["1", "2"], "outputs": ["2", "?"]}
    for address in (None, ""):
        score, known = sandbox_fusion.compute_score(address, None, 1024, DOUBLE, cases, continuous=False, timeout=10)
        assert score == 0.5 and len(known) == 2
    assert sandbox_fusion.compute_score(None, None, 1024, "print(2)", cases) == (
        0.0, [{"error": "Invalid completion (missing code block)"}],
    )  # fmt: skip
    assert sandbox_fusion_utils.check_correctness(None, cases, "print(2)", 10)[0] == [True, False]
    with pytest.raises(ValueError, match="language='cpp'"):
        sandbox_fusion_utils.check_correctness(None, cases, "int main() {}", 10, language="cpp")
