"""The words of the prompts: what is shown, in which order, and what is not."""

from __future__ import annotations

import random

from headwater.stages.fac.prompts import first_prompt, second_prompt

EXAMPLES = ["first\nexample", "second example", "third example"]


def test_a_list_prompt_prefills_the_examples_and_stops_at_the_next_number() -> None:
    user, assistant = first_prompt(EXAMPLES, None, "list", random.Random(0))
    assert user["role"] == "user" and assistant["role"] == "assistant"
    lines = assistant["content"].split("\n")
    assert sorted(line.split(". ", 1)[1] for line in lines[:3]) == ["first example", "second example", "third example"]
    assert lines[3] == "4."


def test_the_order_of_the_examples_depends_on_the_draw_alone() -> None:
    prompts = [first_prompt(EXAMPLES, None, "list", random.Random(seed))[1]["content"] for seed in (1, 1, 2, 3, 4)]
    assert prompts[0] == prompts[1]
    assert len(set(prompts)) > 1


def test_the_strong_example_comes_last_once_and_the_weak_one_only_in_the_wish() -> None:
    user, assistant = second_prompt(("second example", "weak one"), EXAMPLES, None, "list", random.Random(0))
    lines = assistant["content"].split("\n")
    assert lines[-2] == "3. second example"
    assert assistant["content"].count("second example") == 1
    assert "weak one" in user["content"] and "weak one" not in assistant["content"]


def test_without_a_pair_nothing_weak_is_mentioned() -> None:
    with_pair = second_prompt(("strong", "weak one"), [], None, "list", random.Random(0))[0]["content"]
    without = second_prompt(("strong", None), [], None, "list", random.Random(0))[0]["content"]
    assert "weak one" not in without
    assert with_pair.startswith(without)


def test_an_instruction_states_the_explanation_where_there_is_one() -> None:
    (explained,) = second_prompt(("strong", "weak one"), EXAMPLES, "asks for a rhyme", "instruct", random.Random(0))
    assert "asks for a rhyme" in explained["content"]
    assert "- strong" in explained["content"] and "- weak one" in explained["content"]
    (unexplained,) = first_prompt(EXAMPLES, None, "instruct", random.Random(0))
    assert "first example" in unexplained["content"]


def test_a_list_prompt_says_what_its_texts_share_where_that_is_known() -> None:
    for explained in (
        first_prompt(EXAMPLES, "asks for a rhyme", "list", random.Random(0)),
        second_prompt(("strong", "weak one"), EXAMPLES, "asks for a rhyme", "list", random.Random(0)),
    ):
        assert "asks for a rhyme" in explained[0]["content"]
        assert "asks for a rhyme" not in explained[1]["content"]


def test_a_long_example_is_cut_and_stays_on_one_line() -> None:
    assistant = first_prompt(["word \n" * 500], None, "list", random.Random(0))[1]["content"]
    assert len(assistant) < 450 and assistant.count("\n") == 1
