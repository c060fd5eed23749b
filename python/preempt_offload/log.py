"""Loggers that are heard: vLLM configures its own namespace only."""

from __future__ import annotations

import logging


def get_logger(name: str) -> logging.Logger:
    """A logger below vLLM's, with vLLM's level, format and handlers."""
    return logging.getLogger(f"vllm.{name}")
