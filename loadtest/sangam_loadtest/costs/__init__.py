"""What a pass, a transfer and a request cost, per GPU, model and system: roofline terms.

``model`` puts them together for the simulator, ``fit`` finds the constants from measurements, and
``constants.toml`` holds them.
"""
