"""Privacy of obfuscated workloads: what an attacker who holds public models can name."""
