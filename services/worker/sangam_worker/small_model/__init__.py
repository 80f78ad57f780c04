"""The small trained model the repository ships: its material, training and evaluation.

The weights themselves are package data of ``sangam_core`` (``sangam_core/small_model``); the
scripts here made them and measure them. Only ``material`` is used outside this folder: the
integration and load tests ask its held-out questions.
"""
