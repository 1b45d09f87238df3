"""Prompts, rewards, samples, and their split into micro-batches. Imports neither megatron nor torch."""
