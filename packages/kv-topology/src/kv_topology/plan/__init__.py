"""Plans: which bytes of which producer rank a consumer rank reads."""
