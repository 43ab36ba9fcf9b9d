"""Speed and memory as ratios against a named floor or peer, measured in the same run."""
