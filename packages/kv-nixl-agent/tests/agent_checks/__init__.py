"""Checks of the agent whose bodies run on the fake, on NIXL and on a GPU, with the random driver of its loop."""
