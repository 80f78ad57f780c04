"""What router, workers and simulator agree on: policies, lifecycle, wire types, settings.

Nothing here does I/O, reads a clock or imports torch, so that the simulator can run the same
files under virtual time; but for what the services' HTTP servers share (``http_server``).
"""
