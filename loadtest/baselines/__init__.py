"""Other people's decoding loops, rewritten plainly: what the engine is compared with.

Outside ``sangam_loadtest`` because that package, which also runs where no model is, may not
import torch.
"""
