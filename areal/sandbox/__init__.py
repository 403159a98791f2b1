"""Code we do not trust (rewards, agents): a pool of confined worker processes."""
