"""Decides what the small model is taught: seeded questions and answers, and their split.

Called by ``train`` (training items inside dialogues) and ``evaluate`` (held-out items); the
integration and load tests take ``held_out_pairs`` and ``is_right`` to check served answers.
Needs nothing but the standard library.

An item's ``key`` names what must not be known beforehand (the two summands in either order, the
word to reverse); a hash of it puts one key in ten aside, so that no phrasing of a held-out
question is ever trained on.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from sangam_worker.small_model import words

MAX_ANSWER = 127  # bytes: with its EOS an answer fills at most four blocks of 32
HELD_OUT_TENTHS = 1


@dataclass(frozen=True)
class Item:
    """One question with its right answer; ``key`` decides the split."""

    task: str
    question: str
    answer: str
    key: str


@dataclass(frozen=True)
class Message:
    """One message of a dialogue, as in the chat API."""

    role: str
    content: str


def is_held_out(item: Item) -> bool:
    """Whether the item belongs to the held-out tenth; closed tasks have no such part."""
    if item.task in CLOSED_TASKS:
        return False
    digest = hashlib.sha256(f"{item.task}|{item.key}".encode()).digest()
    return digest[0] * 256 + digest[1] < 6554 * HELD_OUT_TENTHS


def _sum(task: str, a: int, b: int, rng: random.Random) -> Item:
    form = "What is {} + {}?" if rng.random() < 0.85 else rng.choice(words.SUM_FORMS)
    low, high = sorted((a, b))
    return Item(task, form.format(a, b), f"{a} + {b} = {a + b}", f"{low}+{high}")


def _sum2(rng: random.Random) -> Item:
    return _sum("sum2", rng.randint(10, 99), rng.randint(10, 99), rng)


def _sum3(rng: random.Random) -> Item:
    return _sum("sum3", rng.randint(100, 999), rng.randint(100, 999), rng)


def _sum_small(rng: random.Random) -> Item:
    pair = [rng.randint(0, 9), rng.randint(0, 99)]
    rng.shuffle(pair)
    return _sum("sum_small", pair[0], pair[1], rng)


def _word(rng: random.Random) -> str:
    """A real word, or a pronounceable one made up, so that letters and not words are learnt."""
    if rng.random() < 0.4:
        return rng.choice(words.COMMON)
    letters = []
    vowel = rng.random() < 0.4
    for _ in range(rng.randint(3, 9)):
        letters.append(rng.choice(words.VOWELS if vowel else words.CONSONANTS))
        vowel = not vowel if rng.random() < 0.8 else vowel
    return "".join(letters)


def _reverse(rng: random.Random) -> Item:
    word = _word(rng)
    return Item("reverse", f"Spell {word} backwards.", word[::-1], word)


def _count(rng: random.Random) -> Item:
    first = rng.choice((1, rng.randint(0, 20), rng.randint(0, 95)))
    last = first + rng.randint(2, 40)
    numbers = list(range(first, last + 1))
    down = rng.random() < 0.25
    if down:
        numbers.reverse()
    question = f"Count{' down' if down else ''} from {numbers[0]} to {numbers[-1]}."
    return Item("count", question, ", ".join(map(str, numbers)), f"{numbers[0]}-{numbers[-1]}")


def _event(rng: random.Random, subject: str) -> words.Event:
    return rng.choice(words.VERBS).at(subject, rng)


def _facts(rng: random.Random, count: int) -> list[words.Event]:
    """Events of distinct subjects in distinct places."""
    while True:
        facts = [_event(rng, subject) for subject in rng.sample(words.SUBJECTS, count)]
        if len({fact.place for fact in facts}) == count:
            return facts


def _story(rng: random.Random) -> Item:
    """The paper's "Where did the cat sit?": the answer is one sentence of the prompt."""
    facts = _facts(rng, rng.choice((1, 1, 2, 2, 3)))
    told = " ".join(map(str, facts))
    asked = rng.choice(facts)
    question = f"{told} {asked.where() if rng.random() < 0.75 else asked.who()}"
    return Item("story", question, str(asked), question)


def _retell(rng: random.Random) -> Item:
    """Answers of two to four blocks: every event of the prompt, in order, joined by words."""
    facts = _facts(rng, rng.choice((2, 3, 3)))
    told = " ".join(map(str, facts))
    parts = [f"{word}, {fact.inner()}" for word, fact in zip(words.ORDER, facts, strict=False)]
    return Item("retell", f"{told} What happened?", " ".join(parts), told)


def _repeat(rng: random.Random) -> Item:
    times = rng.randint(2, 5)
    phrase = " ".join(
        rng.choice((_word(rng), rng.choice(words.COMMON))) for _ in range(rng.randint(1, 3))
    )
    question = f"Repeat {phrase} {words.TIMES[times]} times."
    return Item("repeat", question, ", ".join([phrase] * times) + ".", f"{phrase}*{times}")


def _tale(rng: random.Random) -> Item:
    """An open task: many tales are right, so that unmasking needs several passes."""
    name = rng.choice(words.ANIMALS)
    pick = [rng.choices(options, weights=(70, 20, 10))[0] for options in words.TALE]
    tale = (
        f"Once a {pick[0]} {name} lived {pick[1]}. One day it {pick[2]}. In the end it {pick[3]}."
    )
    return Item("tale", f"Tell me a story about a {name}.", tale, name)


def _talk(rng: random.Random) -> Item:
    questions, answer = rng.choice(words.TALK)
    return Item("talk", rng.choice(questions), answer, answer)


MAKERS: dict[str, tuple[Callable[[random.Random], Item], float]] = {
    "sum2": (_sum2, 4.0),
    "sum3": (_sum3, 3.0),
    "sum_small": (_sum_small, 0.7),
    "reverse": (_reverse, 2.5),
    "count": (_count, 3.0),
    "story": (_story, 2.5),
    "retell": (_retell, 2.0),
    "repeat": (_repeat, 2.0),
    "tale": (_tale, 0.7),
    "talk": (_talk, 1.0),
}
CLOSED_TASKS = frozenset({"tale", "talk"})


def draw(task: str, rng: random.Random) -> Item:
    """Draw an item of the task from either part, its answer within four blocks."""
    while True:
        item = MAKERS[task][0](rng)
        if len(item.answer.encode()) <= MAX_ANSWER:
            return item


def training_item(rng: random.Random, emphasis: Mapping[str, float] | None = None) -> Item:
    """Draw an item of a weighted random task that is not held out; emphasis scales weights."""
    tasks = list(MAKERS)
    scale = emphasis or {}
    weights = [MAKERS[name][1] * scale.get(name, 1.0) for name in tasks]
    task = rng.choices(tasks, weights=weights)[0]
    while is_held_out(item := draw(task, rng)):
        pass
    return item


def held_out_items(task: str, count: int, seed: int = 0) -> Iterator[Item]:
    """Yield up to ``count`` distinct held-out items (closed tasks: distinct trained ones).

    Ends early where the task has fewer: after 2,000 draws in a row without a new question.
    """
    rng = random.Random(f"held-out {task} {seed}")
    seen: set[str] = set()
    idle = 0
    while len(seen) < count and idle < 2000:
        item = draw(task, rng)
        fresh = task in CLOSED_TASKS or is_held_out(item)
        if not fresh or item.question in seen:
            idle += 1
            continue
        idle = 0
        seen.add(item.question)
        yield item


def held_out_pairs(task: str, count: int, seed: int = 0) -> Iterator[tuple[str, str]]:
    """Yield distinct held-out (question, right answer) pairs of a task that is not closed."""
    for item in held_out_items(task, count, seed):
        yield item.question, item.answer


def is_right(task: str, answer: str, given: str) -> bool:
    """Whether a given answer is right: the exact text, or for a tale any tale of the grammar."""
    if task != "tale":
        return given == answer
    name = answer.split(" lived ")[0].rsplit(" ", 1)[1]
    adjectives, homes, deeds, ends = words.TALE
    return given in {
        f"Once a {a} {name} lived {b}. One day it {c}. In the end it {d}."
        for a in adjectives
        for b in homes
        for c in deeds
        for d in ends
    }


def dialogue(item: Item, rng: random.Random) -> list[Message]:
    """The messages of one training prompt: often alone, at times with a system message
    or an earlier turn, so that neither confuses the model."""
    messages: list[Message] = []
    if rng.random() < 0.25:
        messages.append(Message("system", _system(rng)))
    if rng.random() < 0.1:
        earlier = training_item(rng)
        messages.append(Message("user", earlier.question))
        messages.append(Message("assistant", earlier.answer))
    messages.append(Message("user", item.question))
    return messages


def _system(rng: random.Random) -> str:
    if rng.random() < 0.6:
        return rng.choice(words.SYSTEM)
    return " ".join(_word(rng) for _ in range(rng.randint(1, 8))).capitalize() + "."
