"""Which mode, split and settings to run: the search behind ``sangam loadtest recommend``."""
