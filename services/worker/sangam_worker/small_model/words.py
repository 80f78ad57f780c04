"""Decides the vocabulary of the material: word lists, sentence parts and fixed small talk.

Read by ``material`` only. Own work, free of quotations.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

VOWELS = "aeiou"
CONSONANTS = "bcdfghjklmnpqrstvwxyz"

_COMMON = """
apple bread chair cloud dance eagle field flame fruit glass grape green happy heart honey horse
house juice lemon light money mouse music night ocean olive onion paint paper peach pearl piano
plane plant queen quiet radio river robot salad sheep shirt smile snake spoon stone storm sugar
table tiger train water whale wheat world yellow orange purple silver golden garden window basket
bridge button candle carpet castle cheese circle copper cotton desert dinner doctor dragon engine
family farmer finger flower forest friend hammer island jacket jungle kitten ladder letter market
mirror monkey mother needle number orchid palace pebble pencil pepper pillow planet pocket potato
rabbit ribbon rocket saddle salmon school shadow sister spider spring square stream street summer
temple tomato travel tunnel turtle valley velvet violin walnut winter wonder cat dog sun moon star
tree bird fish book lamp door road hill lake rain snow wind fire sand leaf rose ship bell coat
shoe desk cup pen key map red blue cold warm soft loud fast slow kind calm
"""
COMMON = _COMMON.split()

SUM_FORMS = ("{} + {} = ?", "Add {} and {}.", "{} + {}", "How much is {} + {}?", "Compute {} + {}.")

_ANIMALS = (
    "cat dog fox bear frog goat horse mouse owl rabbit duck hen wolf tiger lion crow pig sheep"
)
_NAMES = (
    "Anna Ben Carla David Emma Felix Grace Hugo Iris Jonas Kavi Lena Mira Noah Olga Paul Ravi Sara"
)
ANIMALS = _ANIMALS.split()
SUBJECTS = [*(f"The {animal}" for animal in ANIMALS), *_NAMES.split()]

ORDER = ("First", "Then", "Finally")
TIMES = {2: "two", 3: "three", 4: "four", 5: "five"}


@dataclass(frozen=True)
class Event:
    """One sentence of a story: who did what where."""

    subject: str
    past: str
    base: str
    place: str

    def __str__(self) -> str:
        return f"{self.subject} {self.past} {self.place}."

    def inner(self) -> str:
        """The sentence as it reads after an opening word."""
        return f"{self._lower()} {self.past} {self.place}."

    def where(self) -> str:
        """The question for the place."""
        return f"Where did {self._lower()} {self.base}?"

    def who(self) -> str:
        """The question for the subject."""
        return f"Who {self.past} {self.place}?"

    def _lower(self) -> str:
        return self.subject.replace("The ", "the ")


@dataclass(frozen=True)
class Verb:
    """A verb with the prepositions and things that go with it."""

    past: str
    base: str
    prepositions: tuple[str, ...]
    things: tuple[str, ...]

    def at(self, subject: str, rng: random.Random) -> Event:
        """An event of the subject at a random fitting place."""
        place = f"{rng.choice(self.prepositions)} the {rng.choice(self.things)}"
        return Event(subject, self.past, self.base, place)


_SEATS = ("mat", "chair", "rug", "roof", "wall", "bench", "sofa", "step", "box", "stone")
_COVERS = ("table", "bed", "tree", "bridge", "desk", "blanket", "cart", "stairs")
_GOALS = ("park", "market", "school", "river", "shop", "beach", "lake", "farm", "station", "garden")
_ROOMS = ("kitchen", "garden", "barn", "forest", "attic", "field", "hall", "yard", "tent", "cave")

VERBS = (
    Verb("sat", "sit", ("on", "by"), _SEATS),
    Verb("stood", "stand", ("on", "by"), _SEATS),
    Verb("slept", "sleep", ("under", "on"), _COVERS),
    Verb("hid", "hide", ("under", "behind"), _COVERS),
    Verb("went", "go", ("to",), _GOALS),
    Verb("ran", "run", ("to",), _GOALS),
    Verb("walked", "walk", ("to",), _GOALS),
    Verb("played", "play", ("in",), _ROOMS),
    Verb("ate", "eat", ("in",), _ROOMS),
    Verb("waited", "wait", ("in",), _ROOMS),
)

TALE = (
    ("little", "brave", "clever"),
    ("in a forest", "by a river", "on a hill"),
    ("found a key", "met a friend", "lost its hat"),
    ("went home happy", "danced all night", "slept very well"),
)

SYSTEM = (
    "You are a helpful assistant.",
    "You are a helpful assistant. Answer briefly.",
    "Answer the question.",
    "Be brief.",
    "You are a careful teacher for children.",
    "Reply in one short sentence.",
)

TALK: tuple[tuple[tuple[str, ...], str], ...] = (
    (
        ("Hello", "Hello!", "Hi", "Hi!", "hello", "hi", "Good morning!", "Hello there!"),
        "Hello! I can add numbers, count, spell words backwards and tell where the cat sat.",
    ),
    (
        ("Who are you?", "What are you?", "What is your name?", "who are you?"),
        "I am the small diffusion language model that comes with Sangam.",
    ),
    (
        ("What can you do?", "Help", "help", "Help me.", "How can you help me?"),
        "I add numbers, count, repeat phrases, spell words backwards and answer questions "
        "about short stories.",
    ),
    (("How are you?", "How are you today?", "How do you do?"), "I am fine, thank you."),
    (("Thank you.", "Thank you!", "Thanks", "Thanks!", "thanks"), "You are welcome."),
    (("Goodbye", "Goodbye!", "Bye", "Bye!", "bye"), "Goodbye!"),
    (
        ("Name the days of the week.", "What are the days of the week?"),
        "Monday, Tuesday, Wednesday, Thursday, Friday, Saturday, Sunday",
    ),
    (
        ("Name the months.", "Name the months of the year.", "What are the months of the year?"),
        "January, February, March, April, May, June, July, August, September, October, "
        "November, December",
    ),
    (
        ("Say the alphabet.", "What is the alphabet?"),
        "a b c d e f g h i j k l m n o p q r s t u v w x y z",
    ),
    (
        ("Name the seasons.", "What are the seasons?", "What are the four seasons?"),
        "The four seasons are spring, summer, autumn and winter.",
    ),
    (
        ("Name the planets.", "What are the planets?"),
        "Mercury, Venus, Earth, Mars, Jupiter, Saturn, Uranus, Neptune",
    ),
    (
        ("What is a diffusion language model?",),
        "A model that fills in masked words in any order, several of them at a time.",
    ),
)
