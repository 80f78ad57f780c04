"""Attention over pages and packed rows: a protocol, its layout, and the backends."""
