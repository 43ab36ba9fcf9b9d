"""Published and measured runs against predictions: training steps (league) and servers (serving)."""
