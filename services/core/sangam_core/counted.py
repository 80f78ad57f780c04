"""Numbers with their nouns, as people write them. For whatever is shown: logs count in fields."""


def counted(number: int, one: str, many: str | None = None) -> str:
    """``1 pass`` or ``12 passes``.

    Args:
        many: the plural where it is not ``one`` with an s.
    """
    noun = one if number == 1 else many or f"{one}s"
    return f"{number} {noun}"
