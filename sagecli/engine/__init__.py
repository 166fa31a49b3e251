"""The SAGE-GRPO algorithm: torch only, no files, no printing."""
