"""Speed, side by side with the peers, in one run."""
