"""Helpers for tests: real ranks, and a guard against unpatched loaders."""

from ddp_patch.testing.ranks import run_ranks

__all__ = ["run_ranks"]
