"""The reinforcement-learning loop on one page, and what it needs: configuration, advantages, processes."""
