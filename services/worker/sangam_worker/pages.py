"""The worker's page allocator: the authority on which KV pages are free.

Pure bookkeeping over page numbers; the tensors are ``kv_pool``'s. Called by the scheduler only.
"""

from collections.abc import Sequence


class PageAllocator:
    """Hands out page numbers ``0 .. total_pages - 1``, lowest-recently-freed last (a stack)."""

    def __init__(self, total_pages: int) -> None:
        if total_pages < 1:
            raise ValueError(f"total_pages must be >= 1, not {total_pages}")
        self.total_pages = total_pages
        self._free = list(range(total_pages - 1, -1, -1))
        self._is_free = [True] * total_pages

    @property
    def num_free(self) -> int:
        """Pages that nobody holds."""
        return len(self._free)

    def allocate(self, num_pages: int) -> tuple[int, ...] | None:
        """Take pages, or ``None`` (nothing taken) when too few are free."""
        if num_pages > len(self._free):
            return None
        pages = tuple(self._free.pop() for _ in range(num_pages))
        for page in pages:
            self._is_free[page] = False
        return pages

    def free(self, pages: Sequence[int]) -> None:
        """Give pages back. Giving back a free page is a bug, and raises ``ValueError``."""
        for page in pages:
            if self._is_free[page]:
                raise ValueError(f"page {page} is free already")
            self._is_free[page] = True
            self._free.append(page)
