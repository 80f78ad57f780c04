"""Decode-only iterations as CUDA graphs: buckets, static batches, capture and replay."""
