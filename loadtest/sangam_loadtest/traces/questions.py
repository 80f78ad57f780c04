"""The shipped model's own questions: requests whose answers can be checked under load.

Decides the mix of tasks. Questions are held-out ones, so that a right answer shows what the model
can do, not what it has seen. Called by ``source``; ``is_answer_right`` by the client.
"""

import random
from collections.abc import Iterator

from sangam_loadtest.traces.request import TraceRequest
from sangam_loadtest.traces.text_files import CountsTokens
from sangam_worker.small_model.material import held_out_pairs, is_right

TASKS = ("sum2", "sum2", "sum2", "sum2", "retell", "count", "repeat", "reverse")
"""Half two-digit sums (one block), half answers of one to four blocks."""

MAX_ANSWER_TOKENS = 128
_QUESTIONS_OF_ROUND = 50


def question_requests(seed: int, tokens: CountsTokens) -> Iterator[TraceRequest]:
    """An endless trace of chat requests; questions may come again after some hundreds."""
    rng = random.Random(seed)
    for round_number in range(2**31):
        drawn: list[tuple[str, str, str]] = []
        for task in dict.fromkeys(TASKS):
            count = _QUESTIONS_OF_ROUND * TASKS.count(task)
            pairs = held_out_pairs(task, count, seed=seed * 1_000_003 + round_number)
            drawn += [(task, question, answer) for question, answer in pairs]
        rng.shuffle(drawn)
        for task, question, answer in drawn:
            messages = (("user", question),)
            yield TraceRequest(
                tokens.of_dialogue(messages),
                MAX_ANSWER_TOKENS,
                messages=messages,
                task=task,
                right_answer=answer,
                is_exact_output=False,
            )


def is_answer_right(request: TraceRequest, answer: str) -> bool | None:
    """Whether an answer is right; None where the trace does not know."""
    if request.task is None or request.right_answer is None:
        return None
    return is_right(request.task, request.right_answer, answer)
