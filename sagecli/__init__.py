"""Post-train text-to-video flow-matching models with SAGE-GRPO (arXiv 2603.21872)."""
