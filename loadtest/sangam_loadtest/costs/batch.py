"""What one iteration's cost depends on, and nothing else of it.

Decides the quantities; ``operators`` decides what they cost. Built by the simulator from a plan.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PassBatch:
    """One iteration: the packed rows of decode blocks and whole prefills.

    Attributes:
        num_decodes: decode blocks in it.
        decode_rows: their query rows (with ``dual`` the block length each).
        decode_keys: sum over the decode blocks of the keys that their rows see.
        decode_row_keys: sum over the decode blocks of rows x keys.
        num_prefills: prefills in it.
        prefill_rows: sum of prompt + L.
        prefill_square_rows: sum of (prompt + L) squared.
        head_rows: rows that can still commit a token: masked positions of decode blocks, and
            the block's positions of a prefill.
    """

    num_decodes: int = 0
    decode_rows: int = 0
    decode_keys: int = 0
    decode_row_keys: int = 0
    num_prefills: int = 0
    prefill_rows: int = 0
    prefill_square_rows: int = 0
    head_rows: int = 0

    @property
    def rows(self) -> int:
        """Packed rows."""
        return self.decode_rows + self.prefill_rows

    @property
    def num_sequences(self) -> int:
        """Decode blocks and prefills."""
        return self.num_decodes + self.num_prefills
