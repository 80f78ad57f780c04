"""What ``bench-gpu`` runs as its correctness tests on a CPU: one of each kind."""


def test_heads_of_128() -> None:
    pass


def test_flashinfer_by_name() -> None:
    pass


def test_something_else() -> None:
    pass
