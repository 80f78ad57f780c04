"""Measurements that a person runs; each prints what it saw and can write it as JSON."""
