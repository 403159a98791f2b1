"""Modules shared by all decoder families: args, rope, attention, feed-forward, decoder, names."""
