"""League of published training runs: predicted step times against measured ones."""
