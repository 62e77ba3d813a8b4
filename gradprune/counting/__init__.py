"""Counting FLOPs of what runs, and deriving them from a model's configuration; `gradprune.flops` reports them."""
