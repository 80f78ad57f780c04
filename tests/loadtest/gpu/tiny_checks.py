"""What ``bench-gpu`` runs as its correctness tests on a CPU: one that needs FlashInfer, one not."""


def test_flashinfer_by_name() -> None:
    pass


def test_something_else() -> None:
    pass
