"""What every dense decoder family shares: args, rope, attention, feed-forward, decoder, names."""
