"""The three token ids that a simulated sequence is made of: what they say does not matter."""

MASK_ID = 0
WORD_ID = 1
EOS_ID = 2
