"""How to install the extra of a GPU, for messages that say what cannot be imported.

Not from a registry by the name: PyPI's ``sangam`` is another project.
"""

HOW_TO_INSTALL = "from the checkout: pip install '.[gpu]'"
