"""Tests of the small model's material: it is seeded, rightly answered and split without overlap."""

from __future__ import annotations

import random
import re

import pytest

from sangam_worker.small_model import material, tokens
from sangam_worker.small_model.material import (
    CLOSED_TASKS,
    MAKERS,
    MAX_ANSWER,
    Item,
    Message,
)

OPEN_TASKS = [task for task in MAKERS if task not in CLOSED_TASKS]


def drawn(task: str, count: int = 300, seed: int = 3) -> list[Item]:
    rng = random.Random(seed)
    return [material.draw(task, rng) for _ in range(count)]


def test_same_seed_gives_same_items() -> None:
    first, second = random.Random(5), random.Random(5)
    items = [material.training_item(first) for _ in range(300)]
    assert items == [material.training_item(second) for _ in range(300)]
    assert {item.task for item in items} == set(MAKERS)


def test_closed_tasks_are_tasks() -> None:
    assert set(MAKERS) > CLOSED_TASKS


def test_held_out_pairs_are_repeatable_and_distinct() -> None:
    for task in OPEN_TASKS:
        pairs = list(material.held_out_pairs(task, 40))
        assert len(pairs) == 40
        assert pairs == list(material.held_out_pairs(task, 40))
        assert len({question for question, _ in pairs}) == 40
        assert pairs != list(material.held_out_pairs(task, 40, seed=1))


def test_training_never_sees_a_held_out_key() -> None:
    held = {(i.task, i.key) for task in OPEN_TASKS for i in material.held_out_items(task, 300)}
    rng = random.Random(9)
    trained = {(item.task, item.key) for item in (material.training_item(rng) for _ in range(8000))}
    assert not held & trained


def test_about_a_tenth_is_held_out_in_either_order_of_summands() -> None:
    items = drawn("sum2", 5000)
    share = sum(map(material.is_held_out, items)) / len(items)
    assert 0.07 < share < 0.13
    for item in items[:200]:
        low, high = item.key.split("+")
        assert set(re.findall(r"\d+", item.question)) == {low, high}


@pytest.mark.parametrize("task", ["sum2", "sum3", "sum_small"])
def test_sums_are_right(task: str) -> None:
    digits = {"sum2": (10, 99), "sum3": (100, 999), "sum_small": (0, 99)}[task]
    for item in drawn(task):
        a, b = map(int, re.findall(r"\d+", item.question))
        assert digits[0] <= min(a, b)
        assert max(a, b) <= digits[1]
        assert item.answer == f"{a} + {b} = {a + b}"


def test_words_are_reversed_and_phrases_repeated() -> None:
    for item in drawn("reverse"):
        word = item.question.removeprefix("Spell ").removesuffix(" backwards.")
        assert item.answer[::-1] == word
    for item in drawn("repeat"):
        match = re.fullmatch(r"Repeat (.+) (two|three|four|five) times\.", item.question)
        assert match is not None
        times = {"two": 2, "three": 3, "four": 4, "five": 5}[match[2]]
        assert item.answer == ", ".join([match[1]] * times) + "."


def test_counting_is_right_and_takes_one_to_four_blocks() -> None:
    blocks = set()
    for item in drawn("count"):
        first, last = map(int, re.findall(r"\d+", item.question))
        step = -1 if "down" in item.question else 1
        assert item.answer == ", ".join(map(str, range(first, last + step, step)))
        blocks.add(len(item.answer) // 32 + 1)
    assert blocks == {1, 2, 3, 4}


def test_story_answers_are_the_sentence_asked_for() -> None:
    for item in drawn("story"):
        told, asked = item.question.rsplit(". ", 1)
        sentences = [f"{sentence}." for sentence in told.split(". ")]
        if asked.startswith("Who "):
            fits = [s for s in sentences if s.endswith(asked[4:-1] + ".")]
        else:
            subject = asked.removeprefix("Where did ").rsplit(" ", 1)[0]
            fits = [s for s in sentences if s.lower().startswith(subject.lower() + " ")]
        assert fits == [item.answer]


def test_retelling_keeps_every_sentence_in_order() -> None:
    for item in drawn("retell", 100):
        told = item.question.removesuffix(" What happened?")
        plain = re.sub(r"(First|Then|Finally), ", "", item.answer).replace("the ", "The ")
        assert plain.lower() == told.lower()


def test_answers_fit_four_blocks_and_are_right_by_their_own_rule() -> None:
    for task in MAKERS:
        for item in drawn(task, 100):
            assert len(item.answer.encode()) <= MAX_ANSWER
            assert material.is_right(task, item.answer, item.answer)
            assert not material.is_right(task, item.answer, item.answer + "x")


def test_any_tale_of_the_grammar_is_right_but_for_another_animal() -> None:
    tales = {item.answer for item in drawn("tale") if " fox" in item.question}
    assert len(tales) > 1
    first, second = sorted(tales)[:2]
    assert material.is_right("tale", first, second)
    assert not material.is_right("tale", first, second.replace("fox", "owl"))


def test_dialogues_end_with_the_question_and_vary() -> None:
    rng = random.Random(2)
    item = material.draw("sum2", rng)
    shapes = set()
    for _ in range(200):
        messages = material.dialogue(item, rng)
        assert messages[-1] == Message("user", item.question)
        shapes.add(tuple(message.role for message in messages))
    assert len(shapes) == 4


def test_prompts_follow_the_template_and_decode_stops_at_eos() -> None:
    ids = tokens.encode_prompt([Message("user", " Hi ")])
    assert ids[0] == tokens.BOS
    assert ids.count(tokens.BOS) == 1
    assert ids[1:7] == [tokens.START_HEADER, *b"user", tokens.END_HEADER]
    assert ids[9:12] == [*b"Hi", tokens.EOT]
    assert tokens.decode([*b"42", tokens.EOS, *b"x"]) == "42"
