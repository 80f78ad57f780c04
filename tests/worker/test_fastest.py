"""The fastest of several ways, of those that give what the first one gives."""

import pytest
import torch
from structlog.testing import capture_logs
from torch import Tensor

from sangam_worker.fastest import fastest

RIGHT = torch.tensor([1.0, -2.0, 0.5])


def choose(**found: tuple[float, Tensor] | Exception) -> str:
    """Of kernels that take so long and answer so."""

    def trial(name: str) -> tuple[float, Tensor]:
        outcome = found[name]
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    return fastest("kernel", [*found], trial).name


def test_the_fastest_is_taken() -> None:
    assert choose(fa2=(3.0, RIGHT), fa3=(1.0, RIGHT), blocks=(2.0, RIGHT)) == "fa3"
    assert choose(fa2=(1.0, RIGHT), fa3=(3.0, RIGHT), blocks=(2.0, RIGHT)) == "fa2"
    assert choose(fa2=(1.0, RIGHT), fa3=(1.0, RIGHT)) == "fa2", "as fast as the first"


@pytest.mark.parametrize(
    "answers",
    [RIGHT + torch.tensor([0.0, 0.0, 0.2]), torch.full((3,), torch.nan), 0 * RIGHT],
    ids=["off", "no numbers", "zeros"],
)
def test_a_kernel_whose_answers_are_wrong_is_left_out_and_told(answers: Tensor) -> None:
    with capture_logs() as logs:
        assert choose(fa2=(3.0, RIGHT), bad=(0.1, answers), fa3=(2.0, RIGHT)) == "fa3"
    assert [(each["log_level"], each["name"]) for each in logs] == [("warning", "bad")]


def test_rounding_is_not_wrong() -> None:
    assert choose(fa2=(3.0, RIGHT), other=(2.0, 1.01 * RIGHT)) == "other"
    assert choose(fa2=(3.0, RIGHT), other=(2.0, RIGHT + 0.1)) == "other", "the largest is -2"


def test_a_kernel_that_cannot_run_is_left_out_and_told() -> None:
    with capture_logs() as logs:
        chosen = choose(fa2=(3.0, RIGHT), large=RuntimeError("out of shared memory"))
    assert chosen == "fa2"
    assert logs[0]["error"] == "out of shared memory"


def test_the_first_one_s_failure_is_the_caller_s() -> None:
    with pytest.raises(RuntimeError, match="no GPU"):
        choose(fa2=RuntimeError("no GPU"), fa3=(1.0, RIGHT))


def test_the_first_one_is_measured_twice_since_an_idle_device_is_slow() -> None:
    times = {"fa2": [9.0, 1.0], "fa3": [2.0]}
    assert fastest("kernel", [*times], lambda name: (times[name].pop(0), RIGHT)).name == "fa2"


def test_one_that_is_alone_is_not_even_tried() -> None:
    assert choose(fa2=RuntimeError("not tried")) == "fa2"


def test_it_is_told_with_what_it_takes_of_the_first_one_s_time() -> None:
    times = {"fa2": 4.0, "fa3": 3.0}
    found = fastest("kernel", [*times], lambda name: (times[name], RIGHT))
    assert (found, str(found)) == (("fa3", 0.75), "fa3 (0.75)")
    assert str(fastest("kernel", ["fa2"], lambda name: (1.0, RIGHT))) == "fa2"


def test_a_gain_that_may_be_chance_is_none() -> None:
    assert choose(fa2=(1.0, RIGHT), fa3=(0.995, RIGHT)) == "fa2"
    assert choose(fa2=(1.0, RIGHT), fa3=(0.98, RIGHT)) == "fa3"
