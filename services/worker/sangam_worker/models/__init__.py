"""Models: configurations, tensor names, and the one transformer that runs both families.

No torch on import; ``transformer`` and ``linear`` are the modules that need it.
"""
